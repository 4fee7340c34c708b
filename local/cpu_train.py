"""train.py without a GPU: the same `main()`, smaller constants, and the two patches a CPU needs.

torchrun --nproc-per-node 2 local/cpu_train.py    # `launch.sh --local` does this
"""

import functools
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

# gloo: without a GPU, accelerate is not distributed unless it is told to
os.environ["ACCELERATE_USE_CPU"] = "true"

import accelerate.state
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from trl.experimental.async_grpo import async_grpo_trainer

import train

# The recipe at a fiftieth of its size: a 0.1M-parameter model, 55-token samples, a step in about a
# second.
train.LEARNING_RATE = 2e-3
train.MAX_COMPLETION = 32
train.TOKEN_BUDGET = 2048  # about 36 samples per row, two rows per step
train.ACCUMULATION = 1
train.MAX_INFLIGHT = 64
train.QUEUE_SIZE = 128
train.SAVE_STEPS = int(os.environ.get("SAVE_STEPS", "20"))
train.EVAL_PROMPT = r"Answer in \boxed{}."

# trl 1.14.2, async_grpo_trainer.py, `create_model_from_path(...,
# attn_implementation="kernels-community/flash-attn3")`: hard-coded, GPU only.
create_model = async_grpo_trainer.create_model_from_path
async_grpo_trainer.create_model_from_path = lambda path, **kwargs: create_model(
    path, **kwargs | {"attn_implementation": "sdpa"}
)

# accelerate 1.15.0, state.py, `AcceleratorState.__init__`: the branch for MULTI_CPU never looks at
# the FSDP plugin.
original_init = accelerate.state.AcceleratorState.__init__


@functools.wraps(original_init)
def init_with_fsdp(
    self, *args, fsdp_plugin: FullyShardedDataParallelPlugin | None = None, **kwargs
):
    original_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if (
        fsdp_plugin is not None
        and self._shared_state["distributed_type"] == DistributedType.MULTI_CPU
    ):
        self._shared_state["distributed_type"] = DistributedType.FSDP
        self._shared_state["fsdp_plugin"] = fsdp_plugin


accelerate.state.AcceleratorState.__init__ = init_with_fsdp

if __name__ == "__main__":
    torch.set_num_threads(1)
    train.main()
    if os.environ.get("RANK", "0") != "0":
        # Seen once, with gloo: the interpreter's own end aborted ("terminate called without an
        # active exception"), and torchrun then ended the first process amid its evaluation.
        os._exit(0)
