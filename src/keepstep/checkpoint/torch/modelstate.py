"""A model and its optimizers as one entry of a state, under names that do not depend on how the model is wrapped.

torch's own `torch.distributed.checkpoint.state_dict` gives the names: those of the plain module, for DDP, FSDP, FSDP2 and compiled
modules alike, and optimizer state by the name of its parameter instead of a number. So a checkpoint of a DDP job can be restored by
an FSDP2 job, and parameter groups may be put in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from keepstep.records.errors import ConfigError

MODEL, OPTIM = "model", "optim"


class ModelState:
    """`Checkpointer(root, {"train": ModelState(model, optimizer)})`."""

    def __init__(self, model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Raises ConfigError when one of them is something else."""
        for what, kind in ((model, torch.nn.Module), *((one, torch.optim.Optimizer) for one in optimizers)):
            if not isinstance(what, kind):
                raise ConfigError(f"ModelState: {type(what).__qualname__} is not a torch {kind.__qualname__}")
        self.model = model
        self.optimizers = optimizers

    def state_dict(self) -> dict[str, Any]:
        """Both states. Optimizer state that does not exist yet is made (torch takes a step with gradients and rates of zero)."""
        model, optim = get_state_dict(self.model, list(self.optimizers))
        return {MODEL: dict(model), OPTIM: dict(optim)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave, on this mesh or another."""
        set_state_dict(self.model, list(self.optimizers), model_state_dict=state[MODEL], optim_state_dict=state[OPTIM])

    def buffer_paths(self) -> Iterator[tuple[str, str]]:
        """Where the buffers of the model lie in the state: replicas may differ there, and one of them must be whole."""
        for name, _ in self.model.named_buffers(remove_duplicate=False):
            parts = [part for part in name.split(".") if part not in ("module", "_orig_mod", "_fsdp_wrapped_module")]
            yield MODEL, ".".join(parts)
