"""A GPU that computes nothing, to run torch's own CUDA code where there is no GPU.

``_dummy_gpu.c`` stands in for CUDA's runtime and driver, cuBLAS and cuDNN. Memory is
there, kernels do nothing and take no workspace of their own. So dispatch, streams,
events and above all the caching allocator are torch's, and what they ask for can be
counted; values cannot be had, nor seconds, nor what cuDNN would have chosen.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from ckplan.gpus import Gpu

SOURCE = Path(__file__).with_name("_dummy_gpu.c")
_LIBRARY = "libcuda.so.1"
_ALSO = ("libnvidia-ml.so.1",)
_LIBRARIES = ("lib*cuda*.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
"""Of torch, that ask CUDA's for functions."""
_ASKED_OF = ("cuda", "__cuda", "cu[A-Z]", "cublas", "cudnn")
_NOT_OF = "cuFile"  # whose library needs no GPU
_MACROS = """
#define __device_builtin__
#define __cudart_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define CUDARTAPI
#define CUDART_CB
#define __host__
#define __device__
"""


def why_not() -> str:
    """What is missing here to have one; "" if nothing is."""
    if not torch.backends.cuda.is_built():
        return "needs a build of torch with CUDA"
    if torch.cuda.is_available():
        return "needs a machine without a GPU"
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            return f"needs {tool}"
    return "" if _headers() else "needs the headers of CUDA's runtime"


def build(folder: Path) -> Path:
    """Compile the library for the torch that is installed; returns it."""
    headers = _headers()
    assert headers is not None, "see why_not()"
    macros = folder / "crt" / "host_defines.h"
    macros.parent.mkdir(exist_ok=True)
    macros.write_text(_MACROS)
    names = sorted(_wanted_of_cuda())
    stubs = folder / "succeed.c"
    stubs.write_text(
        "".join(f"__attribute__((weak)) int {n}(void) {{ return 0; }}\n" for n in names)
    )
    library = folder / _LIBRARY
    sources = [str(SOURCE), str(stubs), f"-I{folder}", f"-I{headers}"]
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-w", *sources, "-o", str(library), "-ldl"],
        check=True,
    )
    for name in _ALSO:
        (folder / name).symlink_to(_LIBRARY)
    return library


def environment(library: Path, gpu: Gpu) -> Mapping[str, str]:
    """In which torch finds such a GPU, and takes it for a card."""
    major, minor = gpu.capability
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "DUMMY_GPU_CAPABILITY": str(10 * major + minor),
        "DUMMY_GPU_PROCESSORS": str(gpu.multiprocessors),
        "DUMMY_GPU_THREADS": str(gpu.threads),
        "DUMMY_GPU_BYTES": str(gpu.capacity_bytes),
        "DUMMY_GPU_CUDNN": str(torch.backends.cudnn.version()),
    }


def _headers() -> Path | None:
    packages = Path(torch.__file__).parents[1] / "nvidia"
    found = sorted(packages.glob("*/include/driver_types.h"))
    return found[0].parent if found else None


def _wanted_of_cuda() -> set[str]:
    """Functions that torch's libraries want of others."""
    folder, wanted = Path(torch.__file__).parent / "lib", set[str]()
    for library in [p for pattern in _LIBRARIES for p in folder.glob(pattern)]:
        said = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        wanted |= set(re.findall(r" U (\w+)", said))
    of_cuda = re.compile("|".join(f"^{start}" for start in _ASKED_OF))
    return {n for n in wanted if of_cuda.match(n) and not n.startswith(_NOT_OF)}
