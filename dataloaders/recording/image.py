"""Stand-ins of Pillow's images: format, size, mode and info of the header; calls instead of pixels.

    Image.open ──> Pillow's object ──pose()──> the same object, whose class records
    image.crop, resize, ... ──> a new stand-in
    anything else ──> the property ``im`` ──> decoded, and the object's class is Pillow's again

All code that reads pixels, in Pillow and in other libraries, takes ``im``. So there is no list of
methods that need pixels.
"""

from __future__ import annotations

import copy
import io
import math
import operator
import threading
from collections.abc import Callable
from typing import Any, cast

from PIL import Image

from dataloaders.recording import program
from dataloaders.recording.context import files_only, frozen, recorder, recording
from dataloaders.recording.ops import run, run_now
from dataloaders.recording.posing import posed, posing
from dataloaders.recording.program import Node

MODES = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "P": 1, "LA": 2, "YCbCr": 3, "HSV": 3}
"""Channels of the modes with a byte each."""

_WITHOUT_PALETTE = {"L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"}
_FORMATS = {"JPEG", "PNG", "WEBP"}
_EARLY = {"JPEG", "MPO", "TIFF"}  # plugins that add nothing to ``info`` while they read the pixels
_OTHER_INFO = {"imageops.expand", "fpil.pad", "fpil.adjust_hue", "fpil.to_grayscale"}
_OTHER_INFO |= {"enhance.Brightness", "enhance.Contrast"}  # what they make has not all of ``info``
_RESAMPLING = {None, *(int(each) for each in Image.Resampling)}
_SIDEWAYS = {
    Image.Transpose[name] for name in ("ROTATE_90", "ROTATE_270", "TRANSPOSE", "TRANSVERSE")
}
_TEMPLATE = {**vars(Image.Image()), "_node": None, "_late": False, "_touched": False}
_LOCK = threading.RLock()


def pose(image: Any) -> Any:
    """Turn what Pillow has just opened into a stand-in, if it has one frame of a common format.

    Where only files are recorded, of any format, the first frame counts.
    """
    state, kind = vars(image), cast(Any, type(image))
    common = (
        image.format in _FORMATS
        and (image.mode in MODES or image.mode == "1")
        and getattr(image, "n_frames", 1) == 1
    )
    from_file = kind.__module__.startswith("PIL.") and state.get("fp") is not None
    if (common or files_only()) and from_file:
        state.update(_node=None, _late=image.format not in _EARLY, _touched=False)
        image.__class__ = posing(Recorded, kind)
    return image


def node_of(image: Recorded) -> Node | None:
    """Return the step that makes ``image``; None if it has become Pillow's.

    The file is read and closed here, where Pillow would read it.
    """
    state = vars(image)
    if state.get("_node") is None:
        with _LOCK:
            if isinstance(image, Recorded) and state["_node"] is None:
                _read(image, state)
    return state.get("_node")


def _read(image: Any, state: dict[str, Any]) -> None:
    fp = state["fp"]
    if fp is None or getattr(fp, "closed", False):
        return _restore(image)
    position = fp.tell()
    fp.seek(0)
    data = fp.read()
    own = recorder()
    if own is not None and own.files:
        own.names[id(data)] = str(image.filename or getattr(fp, "name", ""))
    elif not _complete(image.format, data):
        fp.seek(position)
        return _restore(image)  # an error is raised here, where the dataset may catch it
    one_frame = image._close_exclusive_fp_after_loading
    if image._exclusive_fp and (one_frame or files_only()):
        fp.close()
    what = program.Image(image.mode, image.size)
    format = "JPEG" if image.format == "MPO" else image.format  # whose plugin makes it an MPO
    state["_node"] = Node("open", (), (data, format), (), what)
    # A TIFF looks for its EXIF there, when it is asked for.
    state.update(fp=io.BytesIO(data) if format == "TIFF" else None, tile=[])
    return None


def _complete(format: str, data: bytes) -> bool:
    if format == "JPEG":
        return data.endswith(b"\xff\xd9") or data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")
    if format == "PNG":
        return b"IEND" in data[-64:]
    return format != "WEBP" or len(data) >= 8 + int.from_bytes(data[4:8], "little")


def _restore(image: Any) -> None:
    """Make ``image`` Pillow's own again, as it was before ``pose``."""
    image.__class__ = posed(type(image))
    for name in ("_node", "_late", "_touched"):
        vars(image).pop(name, None)


def materialise(image: Any, why: str) -> Any:
    """Decode ``image``, do what was recorded, and return it as an ordinary image."""
    with _LOCK:
        if not isinstance(image, Recorded):
            return image  # another thread did
        if (own := recorder()) is not None:
            own.looked(why)
        state = vars(image)
        node = state["_node"]
        if node is None:  # its file has not been read, which is left to Pillow
            _restore(image)
            return image
        try:
            (real,) = run_now([node])
        except AttributeError as error:  # which NumPy would take for an object without pixels
            raise RuntimeError(f"{node.op} failed at replay") from error
        shared = node.value is real and node.uses > 0
        late = state["_late"]
        kept = {"filename", "fp", "_exclusive_fp", "_exif", *(() if late else ("info",))}
        _restore(image)
        state.update({name: value for name, value in vars(real).items() if name not in kept})
        if shared:
            state["_im"] = real.im.copy()
            state["info"] = dict(state["info"])
            state["palette"] = copy.deepcopy(real.palette)
        return image


def header_of(encoded: bytes, formats: list[str]) -> program.Image | None:
    """Return mode and size of a file of these formats that any decoder takes as Pillow does."""
    with recording(None):
        try:
            image = Image.open(io.BytesIO(encoded), formats=formats)
        except (OSError, ValueError):
            return None
    mode, stored = image.mode, [tile[3] for tile in image.tile]
    plain = mode in ("L", "RGB") and "transparency" not in image.info
    eight_bits = stored in ([mode], [(mode, "")])  # others make uint16 of 16 bits
    if not plain or not eight_bits or not _complete(str(image.format), encoded):
        return None
    return program.Image(image.mode, image.size)


def new(node: Node, like: Recorded | None = None) -> Any:
    """Return a stand-in of what ``node`` makes, with the ``info`` of another."""
    image = object.__new__(_PLAIN)
    state = vars(image)
    mode, size = node.what
    state.update(_TEMPLATE, _node=node, _mode=mode, _size=size, info={})
    if like is not None:
        own = vars(like)
        info = {k: v.copy() if isinstance(v, list) else v for k, v in own["info"].items()}
        state.update(_late=own["_late"], _touched=own["_touched"], info=info)
    return image


def recorded(op: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a stand-in that records ``op``, or returns None if it does not.

    ``rule`` returns what is recorded as arguments, and what comes out; None, or an error, for a
    call that has to be made on pixels.
    """

    def call(image: Any, *args: Any, **kwargs: Any) -> Any:
        if files_only():
            return None
        try:
            found = rule(image, *args, **kwargs)
            node = None if found is None else node_of(image)
            if node is not None:
                args = frozen(found[0])
                made = new(Node(op, (node,), args, (), found[1]), image)
                if op in _OTHER_INFO:
                    vars(made).update(info={}, _late=True, _touched=False)
                return made
        except Exception:
            pass  # if it is the dataset's mistake, it is raised on pixels
        return None

    return call


def _method(rule: Callable[..., Any]) -> Any:
    name = rule.__name__.lstrip("_")
    record = recorded(f"pil.{name}", rule)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = record(self, *args, **kwargs)
        if made is None:
            made = getattr(materialise(self, f"Image.{name}{args!r:.60}"), name)(*args, **kwargs)
        return made

    return call


def _pixels(name: str) -> Any:
    """Return a property that decodes first; but who has no palette has none before, either."""

    def get(self: Any) -> Any:
        if name == "palette" and self.mode not in ("P", "PA"):
            return vars(self)["palette"]
        return getattr(materialise(self, f"Image.{name}"), name)

    def put(self: Any, value: Any) -> None:
        setattr(materialise(self, f"Image.{name} = ..."), name, value)

    return property(get, put)


class Recorded:
    """Mixed into a class of Pillow's: the class of stand-ins that pose as it."""

    mode: str
    size: tuple[int, int]
    tell: Callable[[], int]

    im, palette = _pixels("im"), _pixels("palette")

    @property
    def info(self) -> Any:
        """See Pillow; decodes the image if its plugin reads more of it after the pixels."""
        state = vars(self)
        if state["_late"] and files_only() and (node := node_of(self)) is not None:
            state.update(info=dict(run([node])[0].info), _late=False)
        if state.get("_late"):
            return materialise(self, "Image.info").info
        state["_touched"] = True
        return state["info"]

    @info.setter
    def info(self, value: Any) -> None:
        materialise(self, "Image.info = ...").info = value

    def load(self) -> Any:
        """Read the file; what is returned decodes when it is used."""
        if node_of(self) is None:
            return self.load()  # Pillow's, by now
        return _Access(self)

    def close(self) -> None:
        """See Pillow."""
        _restore(self)
        self.close()

    def __eq__(self, other: object) -> bool:
        materialise(self, "Image.__eq__")
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return materialise(self, "pickle or copy").__reduce_ex__(protocol)

    def draft(self, mode: Any, size: Any) -> Any:
        """See Pillow: it changes how the file is decoded, if that has not been read."""
        return materialise(self, "Image.draft").draft(mode, size)

    def seek(self, frame: int) -> None:
        """See Pillow."""
        if frame != self.tell():
            materialise(self, "Image.seek").seek(frame)

    def copy(self) -> Any:
        """See Pillow; the same step."""
        node = node_of(self)
        return self.copy() if node is None else new(node, self)

    def putpalette(self, *args: Any, **kwargs: Any) -> None:
        """See Pillow, which changes the mode before it takes ``im``."""
        materialise(self, "Image.putpalette").putpalette(*args, **kwargs)

    def convert(self, mode: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See Pillow."""
        if mode == self.mode and not args and not kwargs:
            return self.copy()
        if mode == "RGB" and files_only() and not args and not kwargs:
            node = node_of(self)
            if node is not None and node.op == "open":
                what = program.Image("RGB", self.size)
                return new(Node("pil.convert", (node,), ("RGB",), (), what), self)
        return _convert(self, mode, *args, **kwargs)

    @_method
    def crop(self, box: Any = None) -> Any:
        """See Pillow."""
        if not isinstance(box, (tuple, list)):  # Pillow cannot compare an array with its size
            return None
        left, top, right, bottom = box = tuple([round(each) for each in box])
        if right < left or bottom < top or (right - left) * (bottom - top) > 1 << 26:
            return None
        return (box,), program.Image(self.mode, (right - left, bottom - top))

    @_method
    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        """See Pillow."""
        width, height = size = tuple(map(operator.index, size))
        good = width > 0 and height > 0
        if box is not None:
            left, top, right, bottom = box = tuple(box)
            good = good and 0 <= left < right <= self.size[0] and 0 <= top < bottom <= self.size[1]
        if not good or resample not in _RESAMPLING or (reducing_gap or 1.0) < 1.0:
            return None
        resample = None if resample is None else int(resample)
        return (size, resample, box, reducing_gap), program.Image(self.mode, (width, height))

    @_method
    def transpose(self, method: Any) -> Any:
        """See Pillow."""
        method = Image.Transpose(method)
        size = self.size[::-1] if method in _SIDEWAYS else self.size
        return (method,), program.Image(self.mode, size)

    @_method
    def transform(
        self,
        size: Any,
        method: Any,
        data: Any = None,
        resample: Any = 0,
        fill: Any = 1,
        fillcolor: Any = None,
    ) -> Any:
        """See Pillow."""
        width, height = size = tuple(map(operator.index, size))
        data = [float(each) for each in data]
        # AFFINE, EXTENT, PERSPECTIVE, QUAD: how many numbers they take.
        if len(data) < {0: 6, 1: 4, 2: 8, 3: 8}[int(method)] or not all(map(math.isfinite, data)):
            return None
        if self.mode == "P" or resample not in (0, 2, 3) or min(size) < 1 or fill != 1:
            return None
        args = (size, int(method), data, int(resample), 1, fillcolor)
        return args, program.Image(self.mode, (width, height))

    @_method
    def filter(self, filter: Any) -> Any:
        """See Pillow."""
        chosen = filter() if isinstance(filter, type) else filter
        if type(chosen).__module__ != "PIL.ImageFilter" or self.mode not in ("L", "RGB", "RGBA"):
            return None
        return (chosen,), program.Image(self.mode, self.size)


@_method
def _convert(image: Any, mode: Any) -> Any:
    if mode not in _WITHOUT_PALETTE:
        return None
    if "transparency" in vars(image)["info"] and not (vars(image)["_late"] and image.mode == "P"):
        return None
    return (mode,), program.Image(mode, image.size)


class _Access:
    """What ``load()`` returns: pixel access that decodes first."""

    def __init__(self, image: Any) -> None:
        self._image = image

    def __getitem__(self, place: Any) -> Any:
        return materialise(self._image, "Image.load()[...]").load()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        materialise(self._image, "Image.load()[...]").load()[place] = value


_PLAIN = posing(Recorded, Image.Image)
