"""The private names of torch that plans in compiled code stand on.

No other file of this room uses one. The hook, Inductor's ``CustomPartitionerFn``, is
documented; it is called once per joint graph, after Inductor's passes over that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

try:
    from torch._dynamo.exc import (
        BackendCompilerFailed,
        FailOnRecompileLimitHit,
        ShortenTraceback,
        TorchDynamoException,
    )
    from torch._functorch import config as functorch_config
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._functorch.partitioners import (
        default_partition,
        min_cut_rematerialization_partition,
    )
    from torch._guards import CompileContext
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import (
        OrderedSet,
        Scheduler,
        SchedulerNode,
        StarDep,
        WeakDep,
    )
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
except (ImportError, OSError) as missing:  # what is amiss is said when it is needed
    MISSING: ImportError | OSError | None = missing
    CustomPartitionerFn = ShortenTraceback = object
    TorchDynamoException = BackendCompilerFailed = FailOnRecompileLimitHit = ()
    InvalidCxxCompiler = CppCompileError = ()
    get_cpp_compiler = compile_fx = compile_fx_inner = functorch_config = None
    GraphLowering = OrderedSet = Scheduler = SchedulerNode = StarDep = WeakDep = None
    V = inductor_config = select_decomp_table = free_unbacked_symbols = None
else:
    MISSING = None

__all__ = [
    "ALIGNED",
    "CHECKS",
    "COMPILED",
    "COMPILES_KERNELS",
    "DEPENDENCIES",
    "EXAMPLE",
    "EXTERN_KERNELS",
    "FORWARD_OF_BACKWARD",
    "IN_FORWARD",
    "MAKES",
    "MISSING",
    "PARTITIONER",
    "PLACE",
    "PRIMALS",
    "PROBE",
    "PROBE_OF_AOT",
    "QUICK",
    "RECOMPUTE",
    "ROLE",
    "TANGENTS",
    "WRITTEN",
    "BackendCompilerFailed",
    "Compilation",
    "CppCompileError",
    "CustomPartitionerFn",
    "FailOnRecompileLimitHit",
    "FakeTensorMode",
    "GraphLowering",
    "InvalidCxxCompiler",
    "OpOverload",
    "OrderedSet",
    "Parts",
    "Scheduler",
    "SchedulerNode",
    "ShortenTraceback",
    "StarDep",
    "Symbol",
    "TorchDynamoException",
    "V",
    "WeakDep",
    "bound_of",
    "compilation",
    "compile_fx",
    "compile_fx_inner",
    "copy_of",
    "decompositions",
    "default_parts",
    "evaluate",
    "free_unbacked_symbols",
    "frugal_parts",
    "functorch_config",
    "get_cpp_compiler",
    "inductor_config",
    "layout_at",
    "make_fx",
    "module_of",
    "storage_key",
    "symbol_of",
    "tagged_parts",
    "without_duplicates",
]

Symbol: TypeAlias = Any
"""A symbol of sympy, in place of a size that may change."""
Parts: TypeAlias = tuple[fx.GraphModule, fx.GraphModule]
Compilation: TypeAlias = tuple[int | None, int | None]
"""The code that Dynamo compiles, and how often it has compiled it before."""
"""Forward and backward."""
PRIMALS, TANGENTS = "primals_", "tangents_"
"""How the inputs of a joint graph are called: those of forward, and the gradients."""
FORWARD_OF_BACKWARD = "fwd_nn_module_stack"
"""Where a node of backward keeps the modules that ran its forward."""
PLACE, IN_FORWARD = "partitioner_tag", "is_forward"
"""Where a node of a joint graph keeps that it is one of forward, and what it keeps."""
ROLE, WRITTEN = "desc", "mutated_input"
"""Where inputs and outputs of a graph keep what they are, and which input one fills."""
COMPILED = "_torchdynamo_orig_callable"  # attribute of a compiled function
COMPILES_KERNELS = "from torch._inductor.async_compile import AsyncCompile"
EXTERN_KERNELS = "from torch._inductor.select_algorithm import extern_kernels"
"""Lines of generated code that import what makes kernels, and what calls others."""
CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment")
MAKES = {"empty_strided_cpu": "cpu", "empty_strided_cuda": "cuda"}  # tensors, by device
ALIGNED = "copy_if_misaligned"  # of an input; these are names in generated code
_SOURCES_OF_PARAMETERS, _SOURCE = "_param_name_to_source", "_dynamo_source"
"""Attributes of a graph of Dynamo and of its inputs: where the user has them."""
EXAMPLE = "example_value"
"""Where a node of Dynamo keeps a fake tensor like its value, with symbols as sizes."""
QUICK = {"cpp.simdlen": 0}
"""Options of Inductor for code that is replayed, not run: to vectorize loops takes a
quarter of the time of generating code."""

RECOMPUTE = "recompute_size_and_body"  # of a node of Inductor's scheduler
DEPENDENCIES = "compute_dependencies"  # of Inductor's scheduler
PARTITIONER = "custom_partitioner_fn"  # option of Inductor
_UNBOUNDED = 2**40  # what older versions of torch have in place of infinity is larger
PROBE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
PROBE_OF_AOT = {
    "enable_autograd_cache": False,
    "force_non_lazy_backward_lowering": True,
}
"""Options of Inductor and of AOTAutograd to generate code and run none of it."""


def storage_key(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's storage while it lives."""
    return int(tensor.untyped_storage()._cdata)


def symbol_of(size: torch.SymInt) -> Symbol | None:
    """The symbol that a size is; None if it is computed from symbols."""
    found: Symbol = size.node.expr
    return found if found.is_symbol else None


def bound_of(size: torch.SymInt) -> int | None:
    """The largest value that the user allows for a symbol; None without a bound."""
    upper = size.node.shape_env.var_to_range[size.node.expr].upper
    bound = int(upper) if upper.is_Integer else _UNBOUNDED
    return bound if bound < _UNBOUNDED else None


def evaluate(size: Any, values: Mapping[Symbol, int]) -> int:
    """A size with numbers in place of its symbols."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.xreplace(values))


def layout_at(
    tensor: torch.Tensor, values: Mapping[Symbol, int]
) -> tuple[list[int], list[int]]:
    """Shape and strides of a tensor with numbers in place of symbols."""
    shape, stride = (
        [evaluate(size, values) for size in sizes]
        for sizes in (tensor.shape, tensor.stride())
    )
    return shape, stride


def compilation() -> Compilation:
    """What Dynamo compiles now.

    Parts of one step, divided by graph breaks, are different code.
    """
    found = CompileContext.current_compile_id()
    return (None, None) if found is None else (found.frame_id, found.frame_compile_id)


def default_parts(joint: fx.GraphModule, inputs: Any, how: dict[str, Any]) -> Parts:
    """Forward and backward as torch divides the joint graph without a plan."""
    with _use_lazy_graph_module(True):
        return min_cut_rematerialization_partition(joint, inputs, "inductor", **how)


def frugal_parts(
    joint: fx.GraphModule, inputs: Any, how: dict[str, Any], share: float
) -> Parts:
    """Forward and backward under torch's ``activation_memory_budget``, 0 to 1."""
    with functorch_config.patch(activation_memory_budget=share):
        return default_parts(joint, inputs, how)


def tagged_parts(joint: fx.GraphModule, inputs: Any, how: dict[str, Any]) -> Parts:
    """Forward and backward with exactly the tagged nodes saved."""
    with _use_lazy_graph_module(True):
        return default_partition(joint, inputs, **how)


def decompositions() -> Any:
    """What Inductor replaces ops by, before a joint graph is divided."""
    return select_decomp_table()


def module_of(graph: fx.Graph, attributes: fx.GraphModule) -> fx.GraphModule:
    """A module that runs a graph; its code is written when it runs, which is never.

    Args:
        graph: The graph.
        attributes: The module that has what the graph gets from its own.
    """
    return _LazyGraphModule(attributes, graph)


def without_duplicates(joint: fx.GraphModule) -> fx.GraphModule:
    """The joint graph after elimination of dead code and common subexpressions.

    The default partitioner does the same first, so names of nodes agree with its own.
    """
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()
    return joint


def copy_of(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph of Dynamo; parameters and constants are shared.

    AOTAutograd finds in it where inputs come from, as in the graph itself. Otherwise it
    would not know which are parameters, and would save views of them in their place.
    """
    copied = module_of(copy.deepcopy(graph.graph), graph)
    copied.meta = dict(graph.meta)
    sources = getattr(graph, _SOURCES_OF_PARAMETERS, None)
    if sources is not None:
        setattr(copied, _SOURCES_OF_PARAMETERS, sources)
    places = zip(graph.graph.nodes, copied.graph.nodes, strict=True)
    for node, its_copy in places:
        if hasattr(node, _SOURCE):
            setattr(its_copy, _SOURCE, getattr(node, _SOURCE))
    return copied
