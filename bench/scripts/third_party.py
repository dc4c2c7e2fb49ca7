"""``dataloaders check`` on unmodified scripts of others: is it right?

    BENCH_DATA=DATA BENCH_CODE=CODE [BENCH_SITE=SITE] python -m bench third_party

DATA holds ``photos/*/*.jpg`` and ``mnist/t10k-*.gz``. CODE holds checkouts of pytorch/examples,
pytorch-image-models, pytorch-lightning, vision, transformers, ignite and minGPT, under these names;
SITE holds what they import beside this project's packages, where that is not installed. Scripts
that are not there are left out. Nothing is downloaded, and nothing is changed in CODE but links to
the data; data and working folders are made in ``CODE/run``.

The truth is the rate of a script's own loop on eight of its batches, over and over, divided by the
rate on all of them: three times each, in turns, in one process. A step 20 times as long as the mean
does not count: the script validates in it.
"""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

from bench.harness import Result, Scale, case
from bench.scripts.check import BAR, Script, compared

_TOY = """
import time, torch

model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
for _ in range(1000):
    for batch in torch.utils.data.DataLoader(torch.ones(64, 16), 4):
        model(batch).mean().backward()
        time.sleep(0.005)
        optimizer.step()
        optimizer.zero_grad()
"""


@case(BAR)
def third_party(scale: Scale, folder: Path) -> Result:
    """Is the check right on unmodified scripts of others?"""
    if scale.tiny:
        (folder / "toy.py").write_text(_TOY)
        return compared([Script("toy", ("toy.py",), folder)], 1.0)
    names = ("BENCH_DATA", "BENCH_CODE", "BENCH_SITE")
    found = scripts(*(Path(os.environ[one]) for one in names if one in os.environ))
    return compared([one for one in found if one.name.startswith(scale.only)], 20.0)


def scripts(data: Path, code: Path, *sites: Path) -> list[Script]:
    """Make the data and return the scripts that are there."""
    data, code, *sites = (place.resolve() for place in (data, code, *sites))
    run = code / "run"
    photos, mnist = _photos(data, run / "photos"), run / "data"
    _digits(data, mnist)
    examples, lightning = code / "examples", code / "pytorch-lightning" / "examples"
    _link(run / "data", lightning / "Datasets", lightning.parent / "Datasets")
    imported = [str(site) for site in sites]
    _text(code, run, imported)
    folder = f"{photos}"
    listed = [
        ("mnist", examples / "mnist/main.py", "--epochs 3"),
        ("mnist_rnn", examples / "mnist_rnn/main.py", "--epochs 3"),
        ("mnist_hogwild", examples / "mnist_hogwild/main.py", "--epochs 4 --num-processes 2"),
        ("vae", examples / "vae/main.py", "--epochs 20"),
        ("siamese", examples / "siamese_network/main.py", "--epochs 3"),
        ("dcgan", examples / "dcgan/main.py",
         f"--dataset folder --dataroot {folder}/train --batchSize 16 --niter 3 --workers 2"),
        ("imagenet", examples / "imagenet/main.py",
         f"-a resnet18 -b 16 -j 2 --epochs 3 --no-accel {folder}"),
        ("super_resolution", examples / "super_resolution/main.py",
         "--upscale_factor 3 --batchSize 4 --threads 2 --nEpochs 20"),
        ("timm", code / "pytorch-image-models/train.py",
         f"--data-dir {folder} --model resnet18 -b 16 -j 2 --epochs 3 --num-classes 8 "
         "--device cpu --output ."),
        ("torchvision", code / "vision/references/classification/train.py",
         f"--data-path {folder} --model resnet18 -b 16 -j 2 --epochs 3 --device cpu "
         "--output-dir ."),
        ("lightning_autoencoder", lightning / "pytorch/basics/autoencoder.py",
         "--trainer.max_epochs 20 --trainer.accelerator cpu"),
        ("lightning_classifier", lightning / "pytorch/basics/backbone_image_classifier.py",
         "--trainer.max_epochs 20 --trainer.accelerator cpu"),
        ("fabric_torch", lightning / "fabric/image_classifier/train_torch.py", "--epochs 5"),
        ("fabric", lightning / "fabric/image_classifier/train_fabric.py", "--epochs 5"),
        ("fabric_kfold", lightning / "fabric/kfold_cv/train_fabric.py", "--epochs 5"),
        ("hf_trainer", code / "transformers/examples/pytorch/language-modeling/run_clm.py",
         f"--train_file {run / 'text.txt'} --model_type gpt2 --tokenizer_name {run / 'words'} "
         "--config_overrides n_embd=128,n_layer=4,n_head=4,n_positions=128 --block_size 128 "
         "--do_train --per_device_train_batch_size 8 --gradient_accumulation_steps 4 "
         "--num_train_epochs 3 --output_dir out --use_cpu --report_to none"),
        ("ignite", code / "ignite/examples/mnist/mnist.py", ""),
        ("mingpt", code / "minGPT/projects/adder/adder.py", "--system.work_dir=out"),
    ]  # fmt: skip
    found = []
    for name, script, words in listed:
        if not script.is_file():
            continue
        where = run / "in" / name
        where.mkdir(parents=True, exist_ok=True)
        _link(run / "data", where / "data", where.parent / "data")
        _link(run / "data/MNIST", where / "MNIST")
        _link(run / "bsds", where / "dataset")
        command = (str(script), "--", *words.split())
        path = (*imported, str(code / "minGPT"), str(script.parent))
        found.append(Script(name, command, where, path, spawns=name == "mnist_hogwild"))
    return found


def _photos(data: Path, made: Path) -> Path:
    """Lay out the photos as ImageFolder, torchvision and timm want them, each eight times."""
    for number, photo in enumerate(sorted(data.glob("photos/*/*.[jJ]*"))):
        label = photo.parent.name
        for copy in range(8):
            places = [made / "train" / label / f"{copy}-{photo.name}"]
            places += [made / "val" / label / photo.name] if copy == 0 else []
            places += [made.parent / f"bsds/BSDS300/images/{part}/{number}{copy}.jpg"
                       for part in ("train", "test")]  # fmt: skip
            for place in places:
                place.parent.mkdir(parents=True, exist_ok=True)
                if not place.exists():
                    place.symlink_to(photo)
    return made


def _digits(data: Path, root: Path) -> None:
    """Lay out MNIST's 10,000 test images as both parts of it; the first part has them six times."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for kind, head in (("images-idx3", 16), ("labels-idx1", 8)):
        with gzip.open(data / "mnist" / f"t10k-{kind}-ubyte.gz") as source:
            test = source.read()
        train = test[:4] + (60_000).to_bytes(4, "big") + test[8:head] + 6 * test[head:]
        (raw / f"t10k-{kind}-ubyte").write_bytes(test)
        (raw / f"train-{kind}-ubyte").write_bytes(train)


def _text(code: Path, run: Path, sites: list[str]) -> None:
    """Write some text, and a tokenizer of its words, for language models."""
    (run / "text.txt").write_text(
        "\n".join(one.read_text() for one in sorted(code.glob("*/*.md"))) * 20
    )
    sys.path[:0] = sites
    try:
        from tokenizers import ByteLevelBPETokenizer
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        return
    words = ByteLevelBPETokenizer()
    words.train([str(run / "text.txt")], vocab_size=2000, special_tokens=["<|endoftext|>"])
    PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(run / "words")


def _link(to: Path, *places: Path) -> None:
    for place in places:
        if place.parent.is_dir() and not place.exists():
            place.symlink_to(to)
