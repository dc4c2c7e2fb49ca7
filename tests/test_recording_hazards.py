"""What could go wrong with stand-ins: each hazard run as it is and recorded, on five images."""

import concurrent.futures
import copy
import functools
import io
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps, JpegImagePlugin
from torch.utils.data import DataLoader, default_collate
from torchvision import tv_tensors
from torchvision.io import decode_jpeg
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from helpers.datasets import MapDataset
from helpers.recorded import Code, as_recorded, encoded, equal, path, recording, replayed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HAZARDS = {}


def opened(index):
    return Image.open(path(index))


def small(index):
    return opened(index).convert("RGB").resize((20, 16))


def tensor(index):
    return F.to_tensor(small(index))


def images(**cases):
    """Hazards that start with an image: opened, and made from one."""
    for name, case in cases.items():
        HAZARDS[name] = lambda i, case=case: (case(opened(i)), case(small(i)))


def tensors(**cases):
    """Hazards that start with a tensor."""
    for name, case in cases.items():
        HAZARDS[name] = lambda i, case=case: case(tensor(i))


def after(value, *steps):
    """``value``, when all steps have been done, which have effects."""
    return value


def drawn(image):
    ImageDraw.Draw(image).line((0, 0, 15, 9), fill=200, width=3)
    return image


def methods_taken_first(image):
    crop, convert, draft = image.crop, image.convert, image.draft
    return image.getpixel((3, 4)), crop((1, 2, 9, 9)), convert("L"), draft("L", (9, 9))


images(
    of_another_mode=lambda im: Image.fromarray(np.asarray(im), "HSV"),
    load_reads=lambda im: im.load()[3, 4],
    load_writes=lambda im: after(im, im.load().__setitem__((3, 4), im.load()[7, 7])),
    methods_taken_first=methods_taken_first,
    blend=lambda im: Image.blend(im, im.transpose(1), 0.3),
    putpalette=lambda im: after(grey := im.convert("L"), grey.putpalette(bytes(range(256)) * 3)),
    deep_copied=lambda im: copy.deepcopy({"image": im, "same": im}),
    copied_then_written=lambda im: (drawn(im.copy()), im),
    written_after_a_crop=lambda im: (part := im.crop((1, 1, 9, 9)), drawn(im), part),
    compared=lambda im: (im == im.copy(), im != im.transpose(0), im in [1, im], im == 3),
    unhashable=lambda im: {im},
    instances=lambda im: (
        isinstance(im, JpegImagePlugin.JpegImageFile), type(im) == Image.Image,  # noqa: E721
        {Image.Image: 1, JpegImagePlugin.JpegImageFile: 2}[type(im)],
        type(im).__name__, repr(im).partition(" at ")[0],
    ),
    bad_sizes=lambda im: im.resize((0, 5)),
    bad_boxes=lambda im: im.crop((9, 9, 1, 1)),
    boxes_that_pillow_cannot_compare=lambda im: im.crop(np.array([1, 2, 9, 9])),
    odd_boxes=lambda im: im.crop((-3.6, 2.5, np.int64(12), np.float64(9.5))),
    outer_boxes=lambda im: im.resize((9, 9), 2, (1.5, 2.5, 10.25, 12.75), reducing_gap=2.0),
    matrices=lambda im: im.convert("RGB").convert("L", (0.3, 0.3, 0.3, 0)),
    bilevel=lambda im: (
        im.convert("1"), im.convert("F"), im.convert("I"), F.to_tensor(im.convert("1"))
    ),
    filter_classes=lambda im: (im.filter(ImageFilter.SMOOTH), im.filter(ImageFilter.MinFilter)),
    filters_changed_later=lambda im: (
        im.filter(blur := ImageFilter.GaussianBlur(1)), setattr(blur, "radius", 9)
    ),
    enhancers=lambda im: [
        getattr(ImageEnhance, name)(im).enhance(factor)
        for name in ("Color", "Contrast", "Brightness", "Sharpness")
        for factor in (0.0, 0.4, 1, 1.7)
    ],
    written_before_enhanced=lambda im: after(ImageEnhance.Contrast(im), drawn(im)).enhance(0.5),
    operations=lambda im: [
        ImageOps.expand(im, 3, 7), ImageOps.invert(im), ImageOps.posterize(im, 3),
        ImageOps.solarize(im, 99), ImageOps.autocontrast(im, 2), ImageOps.equalize(im),
        ImageOps.fit(im, (9, 8)), ImageOps.pad(im, (30, 30)), ImageOps.contain(im, (9, 9)),
        ImageOps.grayscale(im), ImageOps.crop(im, 2), ImageOps.scale(im, 0.5),
    ],
    transforms=lambda im: [
        im.transform((9, 9), Image.Transform.QUAD, (0, 0, 0, 9, 9, 9, 9, 0), 2),
        im.transform((9, 9), Image.Transform.EXTENT, (1, 1, 8, 8), fillcolor=(1, 2, 3)),
        im.transform((9, 9), Image.Transform.MESH, [((0, 0, 9, 9), (0, 0, 0, 9, 9, 9, 9, 0))]),
        im.rotate(90), im.rotate(33, expand=True, fillcolor=3), im.rotate(10, center=(1, 2)),
    ],
    information=lambda im: (
        dict(im.info), im.getexif().tobytes(), im.info.update(x=1), im.crop((0, 0, 3, 3)).info
    ),
    information_of_results=lambda im: [
        each.info for each in (
            ImageOps.expand(im, 1), ImageOps.invert(im), ImageEnhance.Brightness(im).enhance(1.0),
            ImageEnhance.Contrast(im).enhance(0.5), F.to_grayscale(im, 3), F.to_grayscale(im, 1),
            F.adjust_hue(im, 0.1), F.pad(im, 2, padding_mode="edge"),
        )
    ],
    information_of_what_is_left=lambda im: drawn(ImageOps.expand(im, 1)),
    converted_to_the_same_mode=lambda im: im.convert(im.mode),
    seeking=lambda im: (getattr(im, "n_frames", 1), im.tell(), im.seek(0), F.to_tensor(im)),
    seeking_too_far=lambda im: im.seek(1),
    verified=lambda im: after(1, im.verify()),
    closed_then_used=lambda im: after(im, im.close()).convert("L"),
    drafts=lambda im: (
        im.draft("L", (20, 20)), im.size, im.mode, F.to_tensor(im), im.draft("L", (5, 5))
    ),
    exif_turned=lambda im: (ImageOps.exif_transpose(im), getattr(im, "_getexif", int)()),
    to_tensors=lambda im: (
        F.to_tensor(im), F.pil_to_tensor(im), v2.functional.to_image(im), tv_tensors.Image(im)
    ),
)  # fmt: skip


def with_return_type(x):
    with tv_tensors.set_return_type("TVTensor"):
        return tv_tensors.Image(x) * 2


def caught(function, *args):
    """The error of a call whose result is not used."""
    try:
        function(*args)
    except Exception as error:
        return type(error)


tensors(
    scripted=lambda x: torch.jit.script(torch.nn.ReLU())(x),
    compiled=lambda x: torch.compile(lambda y: y.flip(0) * 2, backend="eager")(x),
    collated_with_real=lambda x: default_collate([x, torch.ones(3, 16, 20), x + 1]),
    compressed_again=lambda x: v2.functional.jpeg(v2.functional.to_dtype(x, torch.uint8, True), 40),
    mapped=lambda x: torch.vmap(lambda y: y.flip(0))(x),
    grad=lambda x: (x * 2).requires_grad_().sum().backward(),
    numbers=lambda x: (float(x.mean()), x.max().item(), bool(x.any()), len(x), x.tolist()[0][0]),
    numpied=lambda x: (x.numpy(), np.asarray(x), np.add(x, 1)),
    dlpacked=lambda x: torch.from_dlpack(x),
    transposed=lambda x: (
        x.T, x.mT, x.permute(1, 2, 0).reshape(-1), x.flatten()[3:9].view(2, 3)
    ),
    indexed=lambda x: (
        x[0], x[..., None], x[:, 1:5:2], x[x > 0.5], x[[0, 2]], x[torch.tensor([1])]
    ),
    moved=lambda x: (
        x.to("cpu"), x.cpu(), x.double(), x.to(torch.float16), x.type(torch.int32), x.type()
    ),
    strides=lambda x: (
        x.stride(), x.is_contiguous(), x.permute(1, 2, 0).is_contiguous(), x.size(0),
        x.storage_offset(),
    ),
    stridden=lambda x: (v2.functional.horizontal_flip(x).stride(), x.view(-1).shape),
    bad_views=lambda x: x.permute(1, 2, 0).view(-1),
    bad_shapes=lambda x: x + torch.ones(7),
    bad_statistics=lambda x: F.normalize(x, [0.5], [0.0]),
    like=lambda x: (torch.zeros_like(x), torch.rand_like(x), x.new_zeros(2), torch.randn_like(x)),
    draws=lambda x: (x.bernoulli(), torch.bernoulli(x), torch.normal(x), x.uniform_()),
    noise=v2.functional.gaussian_noise,
    noise_beside_other_strides=lambda x: torch.randn_like(F.adjust_hue(x, 0.2)),
    greys_of_one_channel=lambda x: F.rgb_to_grayscale(x[:1], 3).numel(),
    masks_of_the_same_dtype=lambda x: tv_tensors.Mask(x).float(),
    borders_larger_than_the_image=lambda x: caught(F.pad, x, 30, 0, "reflect"),
    blurs_larger_than_the_image=lambda x: caught(F.gaussian_blur, x, [51, 51]),
    floats_that_cannot_be_solarized=lambda x: caught(F.solarize, x, 99.0),
    into_real=lambda x: after(back := torch.zeros(3, 30, 30), back[:, :16, :20].copy_(x)) + back,
    out_arguments=lambda x: torch.stack([x, x], out=torch.empty(0)),
    stacked_with_real=lambda x: torch.stack([x, torch.ones(3, 16, 20), x.clone().cos()]),
    in_place=lambda x: x.mul_(2).add_(1).clamp_(0, 2).sub_(x),
    written_below=lambda x: (
        part := x[0], x + 1, part.mul_(0.5), part.__setitem__(slice(2, 4), 0), x
    ),
    written_above=lambda x: (
        x.view(3, -1)[:, 5:9], x.__iadd__(1), x.__setitem__((slice(None), 0), 7)
    ),
    written_through_numpy=lambda x: (x[1], x.numpy().fill(0.5), x),
    erased=lambda x: F.erase(x, 1, 2, 3, 4, torch.rand(3, 1, 1), inplace=random.random() < 0.5),
    normalized_in_place=lambda x: (F.normalize(x, [0.5], [0.5], inplace=True), x),
    mean_changed_later=lambda x: (
        F.normalize(x, mean := [0.1, 0.2, 0.3], [0.5] * 3), mean.clear(),
        x * (scale := torch.full((3, 1, 1), 2.0)), scale.zero_(),
    ),
    saved=lambda x: torch.load(after(file := io.BytesIO(), torch.save(x, file), file.seek(0))),
    pickled_tensors=lambda x: (pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)),
    exact_types=lambda x: (
        type(x) == torch.Tensor,  # noqa: E721
        {torch.Tensor: 1}[type(x)], isinstance(x, torch.FloatTensor),
    ),
    flavours=lambda x: (
        tv_tensors.Image(x), tv_tensors.Mask(x), tv_tensors.wrap(x * 2, like=tv_tensors.Image(x))
    ),
    flavours_lost=lambda x: [
        tv_tensors.Image(x) * 2, tv_tensors.Image(x).clone(), tv_tensors.Mask(x).to(torch.uint8)
    ],
    masks_pass=lambda x: v2.Normalize([0.5], [0.5])(tv_tensors.Mask(x)),
    masks_keep=lambda x: v2.ToDtype(torch.uint8, scale=True)(
        {"m": tv_tensors.Mask(x), "i": tv_tensors.Image(x)}
    ),
    with_return_type=with_return_type,
    to_pil=lambda x: (
        F.to_pil_image(x), F.to_pil_image(x[:1]), F.to_pil_image((x * 255).byte())
    ),
    expanded=lambda x: (
        x[:1].expand(3, -1, -1), torch.cat([x, x], 1), x.repeat(1, 2, 1), torch.roll(x, 2, 0)
    ),
    unlisted=lambda x: (
        torch.where(x > 0.5, x, -x), x.sort().values, x**2, torch.ops.aten.add(x, 1)
    ),
)  # fmt: skip


HAZARDS |= {
    "arrays_written_later": lambda i: F.to_tensor(
        after(Image.fromarray(array := np.full((9, 8, 3), i, np.uint8)), array.__iadd__(7))
    ),
    "decoders_of_another_format": lambda i: caught(
        decode_jpeg, torch.frombuffer(bytearray(encoded(i, "PNG")), dtype=torch.uint8)
    ),
}  # fmt: skip


def hazard_with_default_dtype(index):
    torch.set_default_dtype(torch.float64)
    try:
        return tensor(index)
    finally:
        torch.set_default_dtype(torch.float32)


def hazard_one_handle_for_two_images(index):
    file = io.BytesIO(encoded(index))
    one = Image.open(file)
    file.seek(0)
    other = Image.open(file)
    return F.to_tensor(one), F.to_tensor(other.resize((9, 9)))


def hazard_reused_buffers(index):
    buffer = io.BytesIO(encoded(index))
    image = Image.open(buffer).convert("RGB")
    buffer.seek(0)
    buffer.write(bytes(300))
    return F.to_tensor(image), buffer.closed


def hazard_handles_closed_early(index):
    with open(path(index), "rb") as file:
        image = Image.open(file)
        size = image.size
    return size, F.to_tensor(image)


def hazard_with_blocks(index):
    with Image.open(path(index)) as image:
        inside = image.convert("RGB")
    with open(path(index), "rb") as file, Image.open(file) as image:
        other = image.resize((9, 9))
    return F.to_tensor(inside), other, image.size


def hazard_members_of_archives(index):
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a", encoded(index))
    with zipfile.ZipFile(zipped) as archive:
        return F.to_tensor(Image.open(archive.open("a")))


def hazard_transparency(index):
    image = Image.open(io.BytesIO(encoded(index, "PNG", "P", transparency=3)))
    return [F.to_tensor(image.convert(mode)) for mode in ("RGBA", "RGB", "L")], image.info


def hazard_text_after_the_pixels(index):
    image = Image.open(io.BytesIO(encoded(index, "PNG", "RGB", dpi=(30, 30))))
    return image.crop((0, 0, 4, 4)).info, image.getexif().tobytes(), image.info


def hazard_several_frames(index):
    file = io.BytesIO()
    frames = [Image.new("RGB", (9, 9), (k * 50, 0, 0)) for k in range(3)]
    frames[0].save(file, ("GIF", "WEBP", "PNG")[index % 3], save_all=True, append_images=frames[1:])
    image = Image.open(file)
    image.seek(2)
    return np.asarray(image.convert("RGB")), image.n_frames


def hazard_errors_that_are_caught_after_draws(index):
    """Without recording, ``convert`` fails, and nothing is drawn before."""
    data = bytearray(encoded(index, "PNG"))
    place = len(data) // 2
    data[place : place + 40] = bytes(40)
    try:
        image = Image.open(io.BytesIO(data)).convert("L")
        return random.random() * np.asarray(image)
    except (OSError, SyntaxError):
        return random.random()


CACHE = {}


@functools.lru_cache
def remembered(index):
    return small(index)


def hazard_escaped_to_caches(index):
    image = remembered(index % 2)
    other = CACHE.setdefault((index % 2, "image"), opened(index % 2))
    kept = CACHE.setdefault((index % 2, "tensor"), tensor(index % 2))
    return F.to_tensor(image), F.to_tensor(other.convert("RGB")), kept + 1


def hazard_threads_inside(index):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(tensor, range(5)))


def hazard_many_threads_materialise_one(index):
    image, x = small(index), tensor(index)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda k: (np.asarray(image).sum(), float(x.sum())), range(8)))


def hazard_its_own_jpeg(index):
    file = io.BytesIO()
    small(index).save(file, "JPEG", quality=30)
    opened(index).save(file2 := io.BytesIO(), "JPEG", quality="keep")
    return F.to_tensor(Image.open(file)), F.to_tensor(Image.open(file2))


def hazard_draws_after_an_error(index):
    if random.random() < 0.5:
        raise ValueError("of the dataset")
    return tensor(index) * random.random()


HAZARDS |= {name: each for name, each in vars().items() if name.startswith("hazard_")}


@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard_is_as_without_recording(name):
    dataset = Code(HAZARDS[name])
    expected = [dataset[index] for index in range(len(dataset))]
    CACHE.clear()
    remembered.cache_clear()
    for upto in ("files", "tail"):
        made, _ = as_recorded(dataset, upto)
        assert [equal(*pair) for pair in zip(made, expected, strict=True)] == [True] * len(dataset)


def test_code_outside_of_the_recording_gets_no_stand_in():
    def sample(index):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: Image.open(io.BytesIO(encoded(index)))).result()
        return type(found) is JpegImagePlugin.JpegImageFile

    assert all(value is True for (value, _) in as_recorded(Code(sample))[0])
    assert sample(0)


def test_a_dataset_that_fails_on_stand_ins_is_asked_again_once():
    runs = []

    def sample(index):
        runs.append(index)
        share, image = random.random(), tensor(index)  # drawn once more on stand-ins
        assert type(image) is torch.Tensor
        return image * share

    loader = DataLoader(MapDataset(sample, 8), 2)
    random.seed(1)
    made = list(recording(loader))
    assert len(runs) == 8 + 1  # the first sample twice
    random.seed(1)
    assert all(map(equal, made, loader))


def test_what_has_no_stand_in_is_sent_as_it_is():
    held = [{"a": 1}, 2]
    (sent,) = recording(DataLoader(MapDataset(tensor, 1), 1, collate_fn=lambda _: held))
    assert sent is held
    looked = MapDataset(lambda index: after(x := tensor(index), x.numpy()), 1)
    ((sent,),) = recording(DataLoader(looked, 1, collate_fn=list))
    assert type(sent) is torch.Tensor


def test_images_opened_in_collation_are_recorded():
    def opens(samples):
        return torch.stack([tensor(index % 5) for index in samples])

    loader = DataLoader(range(8), 4, num_workers=1, collate_fn=opens)
    sent = list(recording(loader))
    assert all(equal(replayed(one), other) for one, other in zip(sent, loader, strict=True))


def test_files_and_bytes_are_kept_on_the_host_whatever_the_default_device_is():
    loader = DataLoader(MapDataset(tensor, 4), 2)
    for upto in ("files", "tail"):
        batches = iter(recording(loader, upto))
        with torch.device("meta"):
            sent = next(batches)
        assert (sent.files if upto == "files" else sent.pixels).is_cpu
