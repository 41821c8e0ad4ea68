"""Make small faults in the package, one at a time, and see whether tests catch them.

    python scripts/faults.py [--tests FOLDER] [--only WORD] [--numbers 1,24]
        [--json FILE]

Every fault changes one line of a copy of the repository and runs the few test files
that should notice. `--tests` takes the tests from another folder, such as those of an
earlier commit, so that two suites are compared on the same faults. Each run is a fork
of this process, which has imported torch once. Tests that take times are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("applying", "cli", "integrations", "report", "tracing", "tracing/cuda")

NO_END = "(no end)"  # which says nothing on a busy machine
TIMED = (
    "graph/test_graph.py::test_a_graph_loads_as_quickly_as_20_000_ops_in_half_a_second",
    "plan/test_plan.py::test_a_small_text_cannot_become_a_huge_plan",
)


class Fault(NamedTuple):
    file: str  # below ckplan/
    old: str  # its first occurrence is replaced
    new: str
    tests: str  # below tests/, and options of pytest


GRAPH = "test_fuzz.py::test_an_inconsistent_trace_is_refused graph/test_graph.py"
UNITS = "test_units.py"
RESOLVE = "plan/test_resolve.py plan/test_bad_plans.py"
PLAN = "plan/test_plan.py plan/test_bad_plans.py"
SIMULATE = "simulating/test_simulate.py simulating/test_program.py"
ALLOCATOR = "simulating/test_caching_allocator.py solving/test_on_card.py"
EXACT = "solving/test_brute_force.py"
SOLVE = "solving/test_brute_force.py solving/test_solving.py"
BOUND = "solving/test_solving.py -k 'bound or moments'"
SCRIPTED = (
    "verifying/test_verify.py -k 'chance or agree or alone or timing or median or "
    "again or alternate or digests'"
)
REPLAY = "applying/test_replay.py applying/test_dynamic.py"
MATCH = "applying/test_matchers.py"
SCRIPT = "applying/test_scripts.py"
AGAIN = "applying/test_checkpoint.py"
CALLS = "applying/test_call_check.py"
BYTES = "applying/test_other_bytes.py"
RERUN = "applying/test_surviving.py applying/test_hazards.py"
CODES = "cli/test_cli.py -k 'not draws and not interrupt and not bad_input'"
IN_PLACE = "tracing/test_in_place.py -k 'formulas or read_twice'"

FAULTS = [
    # graph
    Fault(
        "graph/consistency.py", "if storage.last < storage.maker:", "if False:", GRAPH
    ),
    Fault("graph/consistency.py", "if maker >= index:", "if maker > index:", GRAPH),
    Fault(
        "graph/consistency.py", "if call.stop > graph.num_forward:", "if False:", GRAPH
    ),
    Fault(
        "graph/consistency.py",
        "elif maker < index and storage not in (*op.reads, *op.writes):",
        "elif False:",
        GRAPH,
    ),
    Fault(
        "graph/consistency.py",
        "if saved.last_held < max(saved.unpacked_at, saved.packed_at - 1):",
        "if False:",
        GRAPH,
    ),
    Fault(
        "graph/consistency.py",
        "if not saved.unpacked_at <= saved.last_used <= saved.last_held:",
        "if False:",
        GRAPH,
    ),
    Fault("graph/consistency.py", "if sum(sizes) > MOST_BYTES:", "if False:", GRAPH),
    Fault(
        "graph/consistency.py",
        "if not 0 <= one <= MOST_SECONDS]",
        "if not one <= MOST_SECONDS]",
        GRAPH,
    ),
    Fault(
        "graph/consistency.py",
        "if (call.fqn, call.number) in seen:",
        "if False:",
        GRAPH,
    ),
    # units, errors, encodings, gpus
    Fault("units.py", "return int(size)", "return int(size) + 1", UNITS),
    Fault(
        "units.py",
        "return -(-number // step) * step",
        "return (number // step + 1) * step",
        UNITS + " simulating/test_caching_allocator.py",
    ),
    Fault("units.py", "return float(number) / 100", "return float(number) / 10", UNITS),
    Fault(
        "units.py",
        "if abs(float(number)) < KIB:",
        "if abs(float(number)) <= KIB:",
        UNITS,
    ),
    Fault("units.py", '{"k", "m", "g", "t"}', '{"k", "m", "g"}', UNITS),
    Fault("errors.py", "hint=self.hint)", 'hint="")', "test_errors.py"),
    Fault("errors.py", "exit_code = 3", "exit_code = 1", "test_errors.py " + CODES),
    Fault("errors.py", "exit_code = 4", "exit_code = 1", "test_errors.py " + CODES),
    Fault(
        "encodings.py",
        "if op_name in _MAX_POOL_OPS and output == 1:",
        "if op_name in _MAX_POOL_OPS:",
        "test_encodings.py",
    ),
    Fault(
        "encodings.py",
        "if length > 1 and step != expected:",
        "if step != expected:",
        "test_encodings.py",
    ),
    Fault("encodings.py", "if tensor.storage_offset() or", "if", "test_encodings.py"),
    Fault(
        "gpus.py",
        "return max(flops / flop_rate, ",
        "return min(flops / flop_rate, ",
        "test_gpus.py tracing/test_roofline.py",
    ),
    Fault("gpus.py", "if not 0 < number < math.inf:", "if False:", "test_gpus.py"),
    # plan
    Fault("plan/names.py", "int(occurrence or 0)", "int(occurrence or 1)", RESOLVE),
    Fault(
        "plan/resolve.py",
        "if inside or graph.calls[inner.call].start < graph.calls[last].stop:",
        "if inside:",
        RESOLVE,
    ),
    Fault("plan/resolve.py", "first >= last:", "first > last:", RESOLVE),
    Fault("plan/resolve.py", "if one.parent != other.parent or", "if", RESOLVE),
    Fault("plan/outputs.py", "known.name != form or output in save", "False", RESOLVE),
    Fault(
        "plan/outputs.py",
        "if not outputs or name.output not in (None, *outputs):",
        "if not outputs:",
        RESOLVE,
    ),
    Fault("plan/file.py", "if len(items) != 2:", "if len(items) < 2:", PLAN),
    Fault(
        "plan/file.py",
        'if ("calls" in entries) == ("run" in entries):',
        'if not ("calls" in entries or "run" in entries):',
        PLAN,
    ),
    Fault("plan/file.py", "level == _MOST_LEVELS", "False", PLAN),
    Fault("plan/numbers.py", "if not math.isfinite(found):", "if False:", PLAN),
    # simulating
    Fault(
        "simulating/program.py",
        "uses.update(flow.inputs[maker])",
        "uses.update(flow.inputs[maker][:1])",
        SIMULATE,
    ),
    Fault(
        "simulating/program.py",
        "(value for value in kept if flow.is_current(value))",
        "(value for value in kept)",
        SIMULATE,
    ),
    Fault(
        "simulating/program.py",
        "inside = part.start <= flow.maker_of[value] < part.stop",
        "inside = part.start < flow.maker_of[value] < part.stop",
        SIMULATE + " solving/test_nesting.py",
    ),
    Fault(
        "simulating/ledger.py",
        "if stop > self.moment or self.moment % 2:",
        "if stop >= self.moment or self.moment % 2:",
        SIMULATE,
    ),
    Fault("simulating/ledger.py", "self._runs_left[step] -= 1", "pass", SIMULATE),
    Fault(
        "simulating/ledger.py",
        "2 * view.stop - 1,",
        "2 * view.stop + 1,",
        SIMULATE + " " + EXACT,
    ),
    Fault(
        "simulating/ledger.py",
        "encoding.encode_workspace_bytes - op.workspace.bytes",
        "encoding.encode_workspace_bytes + op.workspace.bytes",
        SIMULATE + " " + EXACT,
    ),
    Fault(
        "simulating/ledger.py",
        "self.effect.coded.append((self.moment, encoding.decode_seconds))",
        "self.effect.coded.append((self.moment, -encoding.decode_seconds))",
        SIMULATE + " " + EXACT,
    ),
    Fault(
        "simulating/effect.py",
        "max(self.retained.get(storage, -1), until)",
        "until",
        SIMULATE,
    ),
    Fault(
        "simulating/effect.py",
        "self.gap_peaks[gap][number] - freed_bytes",
        "self.gap_peaks[gap][number] + freed_bytes",
        SIMULATE,
    ),
    Fault(
        "graph/lifetimes.py",
        "natural = max(start, min(2 * one.last + 1, end))",
        "natural = max(start, min(2 * one.last, end))",
        SIMULATE,
    ),
    Fault(
        "simulating/simulate.py",
        "self.unplanned_bytes[2 * moment + 1] += op.workspace.bytes",
        "pass",
        SIMULATE,
    ),
    Fault(
        "simulating/recomputing.py",
        "most_bytes = max(most_bytes, alive + workspace.bytes)",
        "most_bytes = max(most_bytes, alive)",
        SIMULATE,
    ),
    Fault(
        "simulating/rebuild.py",
        "if self._left[value] == 0:",
        "if self._left[value] <= 1:",
        SIMULATE,
    ),
    Fault(
        "simulating/allocations.py",
        "2 * storage.maker + 1\n        stop",
        "2 * storage.maker\n        stop",
        ALLOCATOR,
    ),
    Fault(
        "simulating/caching_allocator.py",
        "return remaining > SMALL_BYTES",
        "return remaining >= 0",
        ALLOCATOR,
    ),
    Fault(
        "simulating/caching_allocator.py",
        "elif num_bytes < MIN_OWN_SEGMENT_BYTES:",
        "elif num_bytes <= MIN_OWN_SEGMENT_BYTES:",
        ALLOCATOR,
    ),
    # solving
    Fault(
        "solving/chain.py",
        "points.append((max(least, bytes_ - freed)",
        "points.append((bytes_ - freed",
        SOLVE,
    ),
    Fault(
        "solving/chain.py",
        "key=lambda point: point[0]) - 1",
        "key=lambda point: point[0]) - 2",
        SOLVE,
    ),
    Fault("solving/chain.py", "or point[1] < kept[-1][1]", "or False", SOLVE),
    Fault(
        "solving/bound.py",
        "budget_bytes - self._fixed_bytes",
        "budget_bytes + self._fixed_bytes",
        BOUND,
    ),
    Fault(
        "solving/bound.py",
        "later = saved.every_use and saved.every_use[-1][0] > op",
        "later = True",
        BOUND,
    ),
    Fault(
        "solving/bound.py",
        "fast.nanoseconds + share *",
        "fast.nanoseconds + 2 * share *",
        BOUND,
    ),
    Fault(
        "solving/memory_limit.py",
        "return timeline.peak_bytes <= self.bytes",
        "return timeline.peak_bytes < self.bytes",
        "solving/test_on_card.py solving/test_solving.py",
    ),
    Fault(
        "solving/reserved_limit.py",
        "limit.bytes - max(spare_bytes",
        "limit.bytes + max(spare_bytes",
        "solving/test_on_card.py",
    ),
    Fault(
        "solving/planner.py",
        "if _fits(one, budget_bytes))",
        "if _fits(one, 2 * budget_bytes))",
        SOLVE,
    ),
    Fault(
        "solving/menu.py",
        "if change is not None and change.freed_bytes > 0:",
        "if change is not None and change.freed_bytes > 2**20:",
        SOLVE,
    ),
    Fault(
        "solving/closure_problem.py",
        "demand.weight * demand.bytes_of[value], 0)",
        "demand.bytes_of[value], 0)",
        BOUND,
    ),
    Fault(
        "solving/closure_problem.py",
        "if value in demand.copies and not moment:",
        "if False:",
        SOLVE,
    ),
    # verifying
    Fault(
        "verifying/compare_steps.py",
        "if one_threaded and one_threaded[0] == one_threaded[1]:",
        "if one_threaded:",
        SCRIPTED,
    ),
    Fault(
        "verifying/compare_steps.py",
        "if old.get(key) != new.get(key)",
        "if False",
        SCRIPTED,
    ),
    Fault(
        "verifying/outcome.py",
        "peak_bytes <= budget_bytes",
        "peak_bytes < budget_bytes",
        SCRIPTED,
    ),
    # report
    Fault(
        "report/layers.py",
        "getattr(self, n) + getattr(other, n)",
        "getattr(self, n) - getattr(other, n)",
        "report/test_report.py",
    ),
    Fault(
        "report/layers.py",
        "MAX_LAYER_SHARE = 0.25",
        "MAX_LAYER_SHARE = 0.75",
        "report/test_report.py",
    ),
    # cli
    Fault("cli/terminal.py", "return error.exit_code", "return 1", CODES),
    Fault(
        "cli/terminal.py",
        "others = [arg for arg in args if arg != TRACEBACK]",
        "others = args",
        CODES,
    ),
    # applying
    Fault(
        "applying/rebuilding/digest.py",
        "abs(was - is_now) <= noise or",
        "abs(was - is_now) <= 1e9 * noise or",
        "applying/test_unseen.py",
    ),
    Fault(
        "applying/rebuilding/digest.py",
        "if tensor.dtype.itemsize < _LEAST_ITEM_BYTES or",
        "if",
        "applying/test_unseen.py",
    ),
    Fault("applying/rerunning/rerun.py", "self._check_unchanged()\n", "pass\n", RERUN),
    Fault(
        "applying/rerunning/rerun.py",
        "        snapshot.restore(now)\n",
        "",
        RERUN,
    ),
    Fault("applying/rerunning/rerun.py", "        now.restore()\n", "", RERUN),
    Fault(
        "applying/rerunning/attributes.py",
        "or not all(holds(*one) for one in self.containers)",
        "",
        RERUN,
    ),
    Fault(
        "applying/rerunning/rerun.py", "        if different:", "        if 0:", CALLS
    ),
    Fault(
        "applying/tensors/expected_calls.py",
        "else are_switched(call.switches, func)",
        "else True",
        MATCH,
    ),
    Fault(
        "applying/guards/checker.py",
        "same = sized is None or sized.passes(returned[0])",
        "same = True",
        MATCH,
    ),
    Fault(
        "applying/guards/program_cache.py",
        "handle.rebuilder.keep_written()",
        "pass",
        MATCH,
    ),
    Fault(
        "applying/recording/call_log.py",
        "self._storages.leave(tensor, other)",
        "pass",
        BYTES,
    ),
    Fault(
        "applying/tensors/retained.py",
        "if self.digest and digest_of_bytes(tensor.untyped_storage()) != self.digest:",
        "if False:",
        BYTES,
    ),
    Fault(
        "applying/rerunning/unseen_writes.py",
        "if bare is not None and version_of(bare) != version:",
        "if False:",
        BYTES,
    ),
    Fault(
        "applying/guards/guards.py",
        "if any(map(is_array, call.arguments)):",
        "if False:",
        MATCH,
    ),
    Fault(
        "applying/tensors/numbers.py",
        "return is_number(_kind_of(value))",
        "return True",
        MATCH,
    ),
    Fault(
        "applying/tensors/numbers.py",
        "return value.dtype.str, value.shape, found.digest()",
        "return value.dtype.str, value.shape",
        CALLS,
    ),
    Fault(
        "applying/tensors/matchers.py",
        'add(f"type({what}) is {self._name(kind)} and {what} == {literal}")',
        'add(f"{what} == {literal}")',
        MATCH,
    ),
    Fault(
        "applying/guards/checker.py",
        "same = self._inputs.match_constants(constants, returned)",
        "pass",
        REPLAY,
    ),
    Fault(
        "applying/guards/checker.py",
        "self._held[value] = retain_copy(self._held[value].tensor)",
        "pass",
        "applying/test_replay.py applying/test_hazards.py",
    ),
    Fault(
        "applying/tensors/kept.py",
        "if now != version:",
        "if False:",
        "applying/test_hazards.py",
    ),
    Fault(
        "applying/tensors/retained.py",
        "if version_of(tensor) != self.version:",
        "if False:",
        "applying/test_hazards.py",
    ),
    # tracing
    Fault(
        "tracing/faking/inplace_formulas.py",
        '"TakeBackward0": _formula("zeros_like", "put")',
        '"TakeBackward0": _formula("zeros", "put")',
        IN_PLACE,
    ),
    Fault(
        "tracing/faking/inplace_formulas.py",
        '_formula("ge gt lt", "logical_and logical_or")',
        '_formula("lt", "logical_and logical_or")',
        IN_PLACE,
    ),
    Fault(
        "tracing/faking/inplace_formulas.py",
        "accumulate, True)",
        "False, True)",
        IN_PLACE,
    ),
    Fault(
        "tracing/costs/cost_cache.py",
        "if run[0] >= oldest",
        "if run[0] <= oldest",
        "tracing/test_cost_cache.py",
    ),
    Fault(
        "tracing/costs/spread.py",
        "everything - own >",
        "everything >",
        "tracing/test_other_programs.py",
    ),
    Fault(
        "compiling/inductor.py",
        "drawn += node.get_buffer_names()",
        "drawn = []",
        "compiling/test_draw_order.py",
    ),
    Fault(
        "compiling/masks.py",
        "if mask in kept or mask in new",
        "if mask in new",
        "compiling/test_masks.py",
    ),
    Fault(
        "encodings.py",
        "planes[place].to(torch.uint8), place)",
        "planes[place].to(torch.uint8), place - 1)",
        "test_encodings.py",
    ),
    Fault(
        "compiling/cuts.py",
        "if nodes.num_drawn(node) and not draws_again:",
        "if nodes.num_drawn(node) and draws_again is None:",
        "compiling/test_masks.py",
    ),
    Fault(
        "compiling/cuts.py",
        "return 0 if fused or node in again else INFINITE",
        "return 0",
        "compiling/test_cuts.py",
    ),
    Fault(
        "compiling/cuts.py",
        "return self._bytes(node) if can else INFINITE",
        "return self._bytes(node)",
        "compiling/test_cuts.py",
    ),
    Fault(
        "tracing/costs/roofline.py",
        "if dtype != torch.float32:",
        "if dtype == torch.float32:",
        "tracing/test_roofline.py",
    ),
    Fault(
        "tracing/cuda/cublas.py",
        "return WORKSPACE_BYTES_SINCE_HOPPER if since_hopper else WORKSPACE_BYTES",
        "return WORKSPACE_BYTES",
        "tracing/cuda/test_cuda.py -k 'workspaces or blocks'",
    ),
    Fault(
        "tracing/cuda/workspaces.py",
        "return 2 * INDEX_BYTES",
        "return INDEX_BYTES",
        "tracing/cuda/test_reductions.py",
    ),
    # applying: compiled guards, scripts, checkpoints
    Fault(
        "applying/tensors/matchers.py",
        'f"made[{number}]() is {what} is not None"',
        'f"made[{number}]() is {what}"',
        MATCH,
    ),
    Fault(
        "applying/tensors/matchers.py",
        'self.tests.append(f"met[{-1 - number}]() is {what} is not None")',
        "pass",
        MATCH,
    ),
    Fault(
        "applying/tensors/matchers.py",
        'f"met[{-1 - number}]() is',
        'f"met[{number}]() is',
        MATCH,
    ),
    Fault(
        "applying/tensors/matchers.py",
        "if not value or value != value or",
        "if value != value or",
        MATCH,
    ),
    Fault(
        "applying/tensors/matchers.py",
        '[*kwargs] == {keys!r}"',
        '{{*kwargs}} == {set(keys)!r}"',
        MATCH,
    ),
    Fault(
        "applying/tensors/matchers.py",
        ' and len({what}) == {length}"',
        '"',
        MATCH,
    ),
    Fault(
        "applying/tensors/matchers.py",
        'add(f"{what} is {next(self.frozen)!r}")',
        'add(f"{what} == {next(self.frozen)!r}")',
        MATCH,
    ),
    Fault(
        "applying/guards/checker.py",
        "alone &= call is None or not call.finds_written(self.made, self.versions)",
        "pass",
        MATCH,
    ),
    Fault(
        "applying/tensors/expected_calls.py",
        "not _is_autocast_enabled()\n",
        "True\n",
        f"{MATCH} {CALLS}",
    ),
    Fault(
        "applying/guards/input_checker.py",
        "if self._addresses.setdefault(storage, address) != address:",
        "if False:",
        MATCH,
    ),
    Fault(
        "applying/tensors/geometry.py",
        " and tensor.storage_offset() == self._offset",
        "",
        "applying/test_sharing.py",
    ),
    Fault(
        "applying/tensors/sharing.py",
        "found += kind, value.hex()",
        "found += kind, value",
        "applying/test_sharing.py",
    ),
    Fault(
        "applying/tensors/generated.py",
        "exactly(function.__code__, id(names), constants)",
        "exactly(function.__code__, id(names))",
        "applying/test_generated.py",
    ),
    Fault(
        "applying/rebuilding/script.py",
        'self._add(f"del values[{key}]")',
        "pass",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/script.py",
        'copy = f"copied({tensor}, region)" if retained else f"copy_of({tensor})"',
        "copy = tensor",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/script.py",
        "last = not self.runs[step]",
        "last = False",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/script.py",
        "if value in keep and value not in overwritten:",
        "if value not in overwritten:",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/rebuilder.py",
        "            if self._found:\n",
        "            if False:\n",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/rebuilder.py",
        "if self._interrupted:",
        "if False:",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/rebuilder.py",
        "_below_autograd() if answer.computes else nullcontext()",
        "nullcontext()",
        "applying/test_hazards.py -k 'casts'",
    ),
    Fault(
        "applying/rebuilding/schedule.py",
        "        self._at = None",
        "        pass",
        SCRIPT,
    ),
    Fault(
        "applying/rebuilding/schedule.py",
        "            self.start = Stage()",
        "            pass",
        SCRIPT,
    ),
    Fault(
        "applying/tensors/retained.py",
        "if tensor.stride() != stride or",
        "if",
        SCRIPT,
    ),
    Fault(
        "applying/rerunning/checkpoint.py",
        "if first.kinds[number] != (tensor.shape, tensor.dtype, tensor.device):",
        "if False:",
        AGAIN,
    ),
    Fault(
        "applying/rerunning/checkpoint.py",
        "if self.is_complete or self.differs:",
        "if False:",
        AGAIN,
    ),
    Fault(
        "applying/rerunning/checkpoint.py",
        "tensor, numbered.tensor = numbered.tensor, None",
        "tensor = numbered.tensor",
        AGAIN,
    ),
    Fault(
        "applying/rerunning/checkpoint.py",
        "if version != numbered.version:",
        "if False:",
        AGAIN,
    ),
    Fault(
        "applying/rerunning/checkpoint.py",
        "if casts or _is_autocast_enabled(device):",
        "if casts:",
        AGAIN,
    ),
    Fault(
        "applying/rerunning/rerun.py",
        "if modules is None or not modules.are_of(module):",
        "if modules is None:",
        AGAIN,
    ),
    Fault(
        "applying/rerunning/call_check.py",
        "if not self.known.outside[number].passes(tensor):",
        "if not (self._expected or self.known.outside[number].passes(tensor)):",
        CALLS,
    ),
    Fault(
        "applying/rerunning/call_check.py",
        "and not holds_same(first, tensor)",
        "and False",
        CALLS,
    ),
    Fault(
        "applying/tensors/expected_calls.py",
        "and _get_default_dtype() is call.default_dtype",
        "",
        CALLS,
    ),
    Fault(
        "applying/rerunning/call_check.py",
        "if expected.met_versions[place] != version:",
        "if False:",
        CALLS,
    ),
    Fault(
        "applying/rerunning/call_check.py",
        "del self.met[call.num_met :], self.met_versions[call.num_met :]",
        "pass",
        CALLS,
    ),
    Fault(
        "applying/tensors/matchers.py",
        "if number in self.writes:",
        "if False:",
        MATCH,
    ),
    Fault(
        "applying/rerunning/attributes.py",
        "self.plain.values() if isinstance(v, torch.Tensor)]",
        "self.plain.values() if is_state(v)]",
        CALLS,
    ),
    Fault(
        "applying/rerunning/marks.py",
        "last[0] == mark:",
        "True:",
        "applying/test_marks.py",
    ),
    Fault(
        "applying/rerunning/attributes.py",
        "self._marks.are_of(map(vars, self._modules)) and",
        "",
        "applying/test_marks.py",
    ),
    Fault(
        "applying/rerunning/attributes.py",
        "            and all(map(_is, values, self._values))\n",
        "",
        RERUN,
    ),
    Fault(
        "verifying/script_worker.py",
        "            self._keep_gradients(optimizer)\n",
        "            pass\n",
        "cli/test_verified_scripts.py",
    ),
    Fault(
        "verifying/loop_memory.py",
        "held_bytes -= self._beside_bytes",
        "held_bytes -= 0",
        "cli/test_verified_scripts.py",
    ),
    Fault(
        "verifying/script_worker.py",
        "replace_plan(self._job.plan, model, self._job.spill)",
        "replace_plan(None, model, self._job.spill)",
        "cli/test_verified_scripts.py",
    ),
]


def arguments(tests: str) -> list[str]:
    import shlex

    words = shlex.split(tests)
    paths = [f"tests/{word}" for word in words if ".py" in word]
    names = [word for word in words if ".py" not in word]
    return [*dict.fromkeys(paths), *names[-2:]]  # of two -k the last one


def in_child(tree: Path, said: Path, tests: list[str]) -> int:
    os.setpgid(0, 0)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[0] = str(tree)
    for name in list(sys.modules):
        if name.partition(".")[0] == "ckplan":
            del sys.modules[name]
    import pytest

    paths = " ".join(["tests/helpers", *(f"tests/{one}" for one in PLACES)])
    left_out = [f"--deselect=tests/{one}" for one in TIMED]
    options = [*left_out, "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-o"]
    try:
        return int(pytest.main([*options, f"pythonpath={paths}", *tests]))
    except BaseException as error:
        print(f"FAILED to run: {error!r}")  # which is no catch
        return 98


def run(tree: Path, tests: list[str], seconds: int) -> str:
    """The first test that fails; empty if none does."""
    said = tree / "said"
    child = os.fork()
    if not child:
        try:
            os._exit(in_child(tree, said, tests))
        finally:  # never on, as the parent
            os._exit(99)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    else:
        os.killpg(child, 9)
        os.waitpid(child, 0)
        return NO_END
    text = said.read_text(errors="replace")
    if code == 0:
        return ""
    failed = [
        line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))
    ]
    # 98: pytest itself failed; 4 and 5: it has no such test, which is no catch either.
    assert code not in (4, 5, 98), text[-500:]
    return failed[0].split(" - ")[0] if failed else f"(exit code {code})"


def preload() -> None:
    """Import what the package imports; the package itself is imported anew."""
    sys.path[0] = str(ROOT)  # and not scripts/, which has names that others import
    for name in ("cli.plan_commands", "verifying.verify", "auto", "solving.milp"):
        importlib.import_module(f"ckplan.{name}")


def forget_compiled(path: Path) -> None:
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    parser.add_argument("--only", default="", help="of which files: a pattern")
    parser.add_argument("--numbers", default="", help="of which rows, such as 1,24")
    parser.add_argument("--seconds", type=int, default=120, help="per fault, at most")
    parser.add_argument("--json", type=Path, help="to write what was found to")
    parser.add_argument(
        "--first", type=Path, help="only what another run wrote of, its tests first"
    )
    parser.add_argument("--table", type=Path, nargs=2, help="show two such files")
    parser.add_argument("--check", action="store_true", help="no fault at all")
    options = parser.parse_args()
    if options.table:
        print_table(*options.table)
        return
    import torch

    preload()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, str] = {}
    chosen = {number for number in options.numbers.split(",") if number}
    first = json.loads(options.first.read_text()) if options.first else {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("ckplan", "configs", "scripts", "traces"):
            shutil.copytree(ROOT / name, tree / name)
        shutil.copytree(options.tests, tree / "tests")
        shutil.copy(ROOT / "pyproject.toml", tree)
        shutil.copy(ROOT / "README.md", tree)
        if options.check:
            for tests in dict.fromkeys(fault.tests for fault in FAULTS):
                start = time.monotonic()
                said = run(tree, arguments(tests), 600) or "pass"
                print(f"{time.monotonic() - start:.1f} s  {tests}: {said}", flush=True)
            return
        for number, fault in enumerate(FAULTS):
            path = tree / "ckplan" / fault.file
            skipped = options.first and str(number) not in first
            left_out = chosen and str(number) not in chosen
            if skipped or left_out or not re.match(options.only, fault.file):
                continue
            text = path.read_text()
            assert fault.old in text, fault
            path.write_text(text.replace(fault.old, fault.new, 1))
            forget_compiled(path)
            start = time.monotonic()
            caught = ""
            if first.get(str(number), "").startswith("FAILED tests/"):
                # What caught it there is asked before the rest.
                caught = run(tree, [first[str(number)][7:]], options.seconds)
            if not caught.startswith("FAILED"):
                caught = run(tree, arguments(fault.tests), options.seconds)
            path.write_text(text)
            forget_compiled(path)
            found[str(number)] = caught
            seconds = time.monotonic() - start
            said = caught or "SURVIVED"
            print(f"{number:3} {seconds:5.1f} s  {fault.file}: {said}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{num_caught(found)} of {len(found)} faults caught")


def num_caught(found: dict[str, str]) -> int:
    return sum(is_caught(one) for one in found.values())


def is_caught(said: str) -> bool:
    return bool(said) and said != NO_END


def print_table(*files: Path) -> None:
    """What two runs found, side by side."""
    found = [json.loads(file.read_text()) for file in files]
    words = {None: "not run", "": "survived", NO_END: "not decided: time ran out"}
    print(
        "| fault | line | becomes | before | after |\n| --- | --- | --- | --- | --- |"
    )
    for number, fault in enumerate(FAULTS):
        sides = [one.get(str(number)) for one in found]
        cells = [words.get(side) or f"caught by {shown(side)}" for side in sides]
        old, new = (f"`{' '.join(t.split())}`" for t in (fault.old, fault.new or " "))
        row = [str(number), f"`{fault.file}` {old}", new, *cells]
        print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
    for one, name in zip(found, ("Before", "After"), strict=True):
        print(f"\n{name}: {num_caught(one)} of {len(one)} faults that were run.")


def shown(said: str | None) -> str:
    """The file and function of a test."""
    return f"`{str(said).partition('tests/')[2].partition('[')[0]}`"


if __name__ == "__main__":
    main()
