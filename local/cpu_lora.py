"""Keeps adapters off the rows that ask for the base model, in vLLM 0.27.1 on CPU.

vllm/lora/ops/torch_ops/lora_ops.py indexes the adapters' weights with -1 for "no adapter", which in
torch is the last slot: once that slot is filled, every request for the base model is answered with
its adapter. (The GPU's kernels skip those rows.) `local/vllm` names this module as
`--worker-extension-cls`, so the engine's process imports it.
"""

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

shrink = lora_ops.bgmv_shrink


def shrink_adapter_rows(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling=1.0):
    shrink(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
    output_tensor[lora_indices_tensor < 0] = 0  # what is expanded from nothing adds nothing


lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = shrink_adapter_rows


class Extension:
    """vLLM mixes this into its worker; importing the module was all that was needed."""
