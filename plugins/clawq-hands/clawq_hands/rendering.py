"""Which OpenGL MuJoCo uses: decided before MuJoCo is imported, because it cannot be changed after.

Training draws nothing, so it loads no GL at all. Pictures are drawn headless, by EGL where there is a GPU and else by
OSMesa (software). A MUJOCO_GL that the user has set is respected.
"""

import ctypes.util
import glob
import os
import sys

from clawq.errors import UserError

#: MuJoCo's words for "no OpenGL".
OFF = ("disable", "disabled", "off", "false", "0")
#: What to install where nothing can draw.
INSTALL = "apt-get install --no-install-recommends libosmesa6 libegl1 libgl1"


def draw_nothing() -> None:
    """Have MuJoCo load no OpenGL. Does nothing once MuJoCo is imported or the user has chosen."""
    if "mujoco" not in sys.modules:
        os.environ.setdefault("MUJOCO_GL", "disable")


def draw_headless() -> None:
    """Have MuJoCo draw without a screen.

    Raises:
        UserError: no headless OpenGL is installed, or MuJoCo was imported before with another choice.
    """
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if "mujoco" in sys.modules:
        if chosen in (*OFF, ""):
            raise UserError("MuJoCo is running without OpenGL in this process; draw pictures in a process of their own")
        return
    if chosen in (*OFF, ""):
        chosen = _headless()
        os.environ["MUJOCO_GL"] = chosen
    if chosen in ("egl", "osmesa"):
        os.environ.setdefault("PYOPENGL_PLATFORM", chosen)


def _headless() -> str:
    found = {"osmesa": ctypes.util.find_library("OSMesa"), "egl": ctypes.util.find_library("EGL")}
    has_gpu = bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dri/renderD*"))
    # Without a GPU OSMesa comes first: EGL's software device prints an (ignored) EGLError when Python ends.
    for backend in ("egl", "osmesa") if has_gpu else ("osmesa", "egl"):
        if found[backend]:
            return backend
    raise UserError(f"no headless OpenGL (OSMesa or EGL) is installed, so nothing can be drawn. Install it: {INSTALL}")


__all__ = ["draw_headless", "draw_nothing"]
