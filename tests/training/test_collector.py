"""What the garbage collector knows, and what a user has frozen stays frozen."""

import gc

import pytest
import torch

from ckplan.collector import Instances, instances_of


class Kind:
    """Instances of it are looked for."""


class Below(Kind):
    """A subclass, whose instances are not."""


@pytest.fixture
def _thawed():
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("find", [lambda: instances_of(Kind), Instances(Kind)])
def test_all_instances_are_found_and_what_was_frozen_stays_so(find, frozen):
    kept, other = [Kind() for _ in range(3)], Below()
    if frozen:
        gc.freeze()
    kept.append(Kind())
    assert {*map(id, find())} == {*map(id, kept)}
    assert bool(gc.get_freeze_count()) == frozen
    del other


@pytest.mark.usefixtures("_thawed")
def test_tensors_and_parameters_are_found_as_among_all_objects():
    layer = torch.nn.Linear(2, 2)
    kept = [layer(torch.ones(1, 2)), torch.ones(2).view(1, 2)]
    kinds = (torch.Tensor, torch.nn.Parameter)
    wanted = {id(one) for one in gc.get_objects() if type(one) in kinds}
    assert {id(one) for one in instances_of(*kinds)} == wanted
    assert {*map(id, kept), id(layer.weight)} <= wanted
