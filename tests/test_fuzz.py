"""A fuzzer of what reads caches: it sees what it must see, and finds nothing in each target.

sound files ──> damage ──> target, under a guard: a value or a CacheError, else a finding

A seed and the number of the try, which are printed, give the same input again.
"""

import contextlib
import copy
import io
import os
import struct
import sys
import unicodedata
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms  # noqa: F401  # Pillow loads it for the first image of mode LAB
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from backends.h5.batches import proved
from backends.h5.draws import Draws
from dataloaders.cache import CachedDataset, Compressed
from dataloaders.cache.sample.leaf import Leaf
from dataloaders.cache.sample.sample import leaf_paths
from dataloaders.cli import main
from dataloaders.errors import CacheError, MissingDependency
from dataloaders.seeding.seeded import seed_generators
from dataloaders.seeding.words import words
from helpers.cached import DTYPES, MODES, TORCH_DTYPES, Point, build, build_of_leaves, built, mixed
from helpers.compare import same
from helpers.datasets import Made
from helpers.hostile import Whole, said_of

# Damage of the index by its structure, of arrays by their values, and of bytes. Most results have
# the digest and the length that they say, or are written by this package itself: they are read


LARGEST = 1 << 17  # bytes of a file: small files are run often
_NUMBERS = (
    -1, 0, 1, 2, 3, 7, 8, 10, 11, 12, 16, 63, 64, 65, 255, 256, 4095, 4096, 4104, 2**31, 2**32,
    2**47, 2**48, 2**48 + 1, 2**52, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64, 10**30,
)  # fmt: skip
_SIZES = (0, 1, 2, 3, 4, 5, 60, 1 << 40)
_TEXTS = (
    "int", "float", "bool", "str", "none", "json", "array", "scalar", "tensor:float32", "image:L",
    "image:RGB", "encoded:PNG:RGB", "encoded:JPEG:P", "file:RGB", "encoded:PNG:P", "pickle", "|O",
    "tv_tensor:BoundingBoxes:uint8", "<U4", "|V8", "u1,f4", "<f16", *sorted(DTYPES), "dict",
    "list", "tuple", "namedtuple", "lambda", "_x", "../../x", "/etc/passwd", "a" * 300,
    "\x1b[2J\x1b]0;x\x07", "\ud800", "é\u202e", "x,y):0#", "[red]", "\0", "\n", "", " ", ".",
)  # fmt: skip
_ODD_BYTES = (b"[" * 2000, b"9" * 5000, b"NaN", b"1e999", b"\xff\xfe", b"\xed\xa0\x80", b'{"a":')


def raw(data, random):
    """``data`` with a few bytes changed, inserted or deleted."""
    made = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at, other = (random.randrange(len(made) + 1) for _ in "ab")
        some = random.choice(_ODD_BYTES)[: random.choice((1, 4, 5000))]
        begin, end, new = random.choice([
            (at, at + 1, bytes([random.randrange(256)])),
            (at, at, some),
            (at, at + random.choice((1, 1, 8, 100)), b""),
            (at, at, made[other : other + random.randint(1, 40)]),
        ])  # fmt: skip
        made[begin:end] = new
    return bytes(made)


def damaged(data, random):
    """Another cache; most have an index whose digest is right."""
    kind = random.random()
    try:
        whole = Whole(data)
        if kind < 0.03:
            return raw(data, random)
        if kind < 0.06:
            return data[: random.randrange(len(data) + 1)]
        if kind < 0.12:
            return whole.with_text(raw(whole.text, random))
        if kind < 0.3:
            for _ in range(random.choice((1, 1, 2, 3))):
                whole.fields = _changed(whole.fields, random)
        elif kind < 0.5:
            return _rebuilt(whole.fields, random)[:LARGEST]
        else:
            whole.body = _with_other_values(whole, random)
        return whole.with_fields(whole.fields)[:LARGEST]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):
        return raw(data, random)  # what cannot be read or changed so
    except (CacheError, OSError, struct.error):
        return raw(data, random)


# The index


def _value(random):
    kind = random.randrange(7)
    if kind < 3:
        return random.choice((*_NUMBERS, random.randrange(1 << random.choice((4, 8, 16, 40)))))
    if kind < 5:
        return random.choice(_TEXTS)
    if kind == 5:
        return random.choice((None, True, False, 0.5, float("inf"), float("nan"), -0.0, 1e300))
    deep = [random.choice(_NUMBERS) for _ in range(random.randrange(4))]
    for _ in range(random.choice((0, 0, 1, 3, 70, 400))):
        deep = [deep] if random.random() < 0.5 else {random.choice(_TEXTS): deep}
    return deep


def _places(value):
    """Each container in some JSON, with each of its keys."""
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def _changed(value, random):
    """Some JSON of which one place is another."""
    places = list(_places(value))
    if not places or random.random() < 0.01:
        return _value(random)
    (inner, key), (other, others) = random.choice(places), random.choice(places)
    kind = random.randrange(8)
    if kind == 0:
        del inner[key]
    elif kind == 1 and isinstance(inner, list):
        inner.insert(key, copy.deepcopy(random.choice((_value(random), inner[key]))))
    elif kind == 1:
        inner[random.choice(_TEXTS)] = _value(random)
    elif kind == 2:  # a part of the same document in another place
        inner[key] = copy.deepcopy(other[others])
    elif kind == 3 and isinstance(inner, dict):
        inner[random.choice(_TEXTS)] = inner.pop(key)
    elif kind == 4:
        name = random.choice(("list", "tuple", "dict", "namedtuple"))
        pair = [[random.choice(_TEXTS), inner[key]]]
        inside = {"dict": pair, "namedtuple": [random.choice(_TEXTS), pair]}
        inner[key] = {name: inside.get(name, [inner[key]])}
    elif kind == 5 and type(inner[key]) is int:
        inner[key] += random.choice((-9, -8, -1, 1, 2, 8, 9, 4096))
    else:
        inner[key] = _value(random)
    return value


def _rebuilt(fields, random):
    """A sound file of such leaves, in columns of other kinds, with other shapes and values."""
    columns = [random.choice(fields["columns"]) for _ in fields["columns"]]
    shapes = [_shape(column, random) if random.random() < 0.5 else None for column in columns]
    samples = []
    for _ in range(random.choice((1, 2, 5))):
        leaves = []
        for column, one in zip(columns, shapes, strict=True):
            kind, dimensions = random.choice(column["variants"])
            shape = (_shape(column, random) if one is None else one)[:dimensions]
            values = np.zeros(shape, column["dtype"])
            if values.size:
                values = np.frombuffer(random.randbytes(values.nbytes), values.dtype)
            leaves.append(Leaf(kind, values.reshape(shape)))
        samples.append((fields["structure"], leaves))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.h5"
        with suppress(CacheError):  # the index is refused when it is read again
            build_of_leaves(path, samples)
        return path.read_bytes()


def _shape(column, random):
    """A shape like that of the column, of a few values or, by its zeros, of none."""
    like = column["shape"] or [3] * max(of for _, of in column["variants"])
    shape = [random.choice((size, random.choice(_SIZES))) for size in like]
    return shape if 0 in shape or np.prod(shape) < 1 << 12 else [min(size, 3) for size in shape]


# The arrays


def _with_other_values(whole, random):
    """The body, with one or more arrays changed."""
    body = bytearray(whole.body)
    if body and random.random() < 0.2:  # the pieces of compressed columns: anywhere
        for _ in range(random.randint(1, 6)):
            body[random.randrange(len(body))] = random.randrange(256)
        return bytes(body)
    for _ in range(random.choice((1, 1, 2, 4))):
        (offset, size), width = random.choice(list(_arrays(whole.fields)))
        begin, end = offset - whole.block, offset - whole.block + size * width
        if not 0 <= begin < end <= len(body):
            continue
        if width == 8 and random.random() < 0.8:
            # Sums of a few offsets are small: rows of such sizes are read, not only refused.
            values = np.frombuffer(bytes(body[begin:end]), "<u8").copy()
            at = random.randrange(len(values))
            values[at] = random.choice((*_NUMBERS[1:-2], int(values[at]) + 1)) % (1 << 64)
            if random.random() < 0.3:
                values.sort()
            body[begin:end] = values.tobytes()
        else:
            array = bytes(body[begin:end])
            new = random.choice(_ODD_BYTES) + array if random.random() < 0.1 else raw(array, random)
            body[begin:end] = new[: end - begin].ljust(end - begin, new[-1:] or b"\0")
    return bytes(body)


def _arrays(fields):
    """Where each array stands, and the bytes of a value."""
    for column in fields["columns"]:
        width = np.dtype(column["dtype"]).itemsize if column["dtype"] in DTYPES else 1
        places = [(column["values"], width), (column["codes"], 1)]
        if column["packing"] is not None:
            places[0] = (column["packing"]["pieces"], 8)
        places += [(column[part], 8) for part in ("offsets", "shapes")]
        yield from (each for each in places if each[0] is not None)
    if fields["failed"] is not None:
        yield fields["failed"]["messages"], 1
    if fields["attributes"] is not None:
        yield fields["attributes"], 1


# Targets: each reads an input in every way that the package has. It returns for a value and for a
# documented error alike, and fails (an assertion, another exception) for what must not be


def sound_files(folder):
    """Small caches of every sort of column: single, compressed, and joined of shards."""
    classes = {"classes": ["cat", ("dog", "hound")], "class_to_idx": {"cat": 0, "dog": 1, "é": -7}}
    failures = [(1, "ValueError: it is torn"), (3, "é")]
    tv = [torch.zeros(2, 3, 4, 5, dtype=torch.uint8), torch.rand(3, 4, 5), torch.ones(4, 5)]
    kinds = [3, 1.5, 1j, True, "text", b"bytes", bytearray(b"more"), [1, {"a": [None]}], None]
    every = {
        "kinds": tuple(kinds),
        "images": [Image.new(mode, (3, 2)) for mode in MODES],
        "tensors": [torch.zeros(2, 3).to(dtype) for dtype in TORCH_DTYPES],
        "arrays": tuple(np.ones((1, 2), dtype) for dtype in sorted(DTYPES)),
        "tv": [tv_tensors.Video(tv[0]), tv_tensors.Image(tv[1]), tv_tensors.Mask(tv[2])],
        "deep": {1: [Point((0, {"b": ()}), [torch.ones(1)])], "c": {}},
    }
    said = {"head": ["Resize(8)"], "tail": ["Normalize()"], "fingerprint": {"f": 1}}
    for samples, options in (
        (mixed(3), {"failed": failures, "attributes": classes, **said}),
        ([every, {**every, "kinds": (None,) * len(kinds)}], {}),
        ([], {"failed": failures}),
        ([None, None], {}),
        *(([_compressible(row) for row in range(80)], {"compress": Compressed(codec)})
          for codec in ("zstd", "gzip")),
    ):  # fmt: skip
        build(folder / "a.h5", samples, **options)
        yield (folder / "a.h5").read_bytes()
    for name, sample in (
        ("fixed", lambda index: {"number": index, "array": np.full((70, 70), index / 7)}),
        ("varies", lambda index: {"text": "a" * index, "array": np.full((index % 2, 3), index)}),
    ):
        yield built(
            Made(sample, 7), folder / f"{name}.h5", rows=3, single_file=False
        ).path.read_bytes()


def _compressible(row):
    return {
        "fixed": np.full(400, row, "<i4"),
        "varies": np.arange(row * 30, dtype="<f4") // 9,
        "text": f"ab{row}" * 300,
        "noise": np.random.default_rng(row).bytes(20),
    }


def _file(path):
    """A cache: opened, read to the last row, and verified; returns whether there was no error."""
    return not said_of(path, path.read_bytes(), most=300 << 20)


def _shown(path):
    """What the command line makes of a cache: info."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(shown):
        status = main(["cache", "info", str(path)])
    shown.flush()
    text = shown.buffer.getvalue().decode("utf-8")
    odd = {each for each in text if unicodedata.category(each) in ("Cc", "Cs")} - {"\n"}
    assert not odd, f"these reach the terminal: {odd!r}"
    return status == 0


def _batches(path):
    """Whole batches, which are those that torch collates."""
    crop = v2.Compose([v2.RandomCrop(2), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    try:
        plain = CachedDataset(path)
        structure = plain.index.structure
        paths = [] if structure is None or not len(plain) else leaf_paths(structure)
        tails = [
            (keys, crop)
            for keys, column in zip(paths, plain.columns, strict=False)
            if column.variants[0][0].startswith("image:")
        ]
        cached = CachedDataset(path, tails=tails)
        made = proved(cached)
        if isinstance(made, str):
            return False
        rows = list(range(min(len(cached), 5)))[::-1]
        seeding = words(3, 0, np.arange(len(rows)))
        try:
            found = made.of(rows, Draws(seeding))
        except Exception as error:  # then it is collated sample by sample
            if type(error).__name__ != "NotThisBatch":
                raise
            found = None
        samples = []
        for row, four in zip(rows, seeding.tolist(), strict=True):
            seed_generators(tuple(four))
            samples.append(cached[row])
        assert found is None or same(found, default_collate(samples), strides=False)
    except (CacheError, MissingDependency):
        return False
    return True


TARGETS = {"file": _file, "shown": _shown, "batches": _batches}


# The fuzzer: a moment by day, longer by night


MANY = int(os.environ.get("FUZZ_TRIES", "500"))
OF_CORES = ("/proc/self/", "/sys/fs/cgroup/")
FORBIDDEN = (
    *("import", "pickle.", "marshal.", "ctypes.", "subprocess.", "socket."),
    *("os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.system"),
)
ALLOWED = []  # where files may be opened now; if empty, nothing is watched


def audit(event, arguments):
    if not ALLOWED or not (event == "open" or event.startswith(FORBIDDEN)):
        return
    if event != "open":
        raise AssertionError(f"{event} {arguments[:1]!r:.150}")
    if isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.fsdecode(arguments[0])
        folder = ALLOWED.pop()  # what follows opens files itself
        is_inside = Path(os.path.realpath(path)).is_relative_to(folder)
        ALLOWED.append(folder)
        assert is_inside or path.startswith(OF_CORES), path


begin = cache(lambda: sys.addaudithook(audit))  # which stays to the end of the process


@contextmanager
def watched(folder):
    """Let nothing be imported, started, unpickled or opened elsewhere."""
    begin()
    ALLOWED.append(folder.resolve())
    try:
        yield
    finally:
        ALLOWED.clear()


def test_what_a_file_must_not_do_is_seen(tmp_path):
    (tmp_path / "link").symlink_to("/etc/hosts")
    for call in (
        lambda: Path("/etc/hosts").read_text(),
        lambda: (tmp_path / "link").read_text(),
        lambda: os.system("true"),
        lambda: __import__("this_is_no_module"),
    ):
        with pytest.raises(AssertionError), watched(tmp_path):
            call()
    with watched(tmp_path):
        (tmp_path / "a").write_text("a")


def fuzz(name, tries, seed, folder):
    path = folder / "a.h5"  # beside the parts of the joined ones

    def run(data, watching=nullcontext):
        path.write_bytes(data)
        with watching(folder):
            return TARGETS[name](path)

    files = list(sound_files(folder))
    inputs = [data for data in files if run(data)]  # imports at first use are no finding
    assert inputs if name == "batches" else inputs == files
    random, sound = Random(seed), len(inputs)
    for number in range(tries):
        print(f"{name}, seed {seed}, try {number}")
        data = damaged(random.choice(inputs), random)
        if run(data, watched):
            inputs.append(data)
    assert len(inputs) > sound + tries // 10, "values are read too, and not only indexes refused"


@pytest.mark.parametrize(("name", "tries"), [("file", 70), ("shown", 8), ("batches", 40)])
def test_a_moment_of_each_target(name, tries, tmp_path):
    fuzz(name, tries, 1, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_many_tries_of_each_target(name, tmp_path):
    fuzz(name, MANY, 2, tmp_path)
