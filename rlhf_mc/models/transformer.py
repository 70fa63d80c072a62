"""The decoder of every role: megatron-core's GPTModel with our attention, norm and rotary tables; it ends at the hidden states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_mc.config import ConfigError, Recompute
from rlhf_mc.models.elementwise import RMSNorm, SwiGLU
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.parallel.attention import PackedAttention
from rlhf_mc.parallel.grids import TrainingGrid
from rlhf_mc.parallel.megatron_cpu import cpu_tensors_pass_for_cuda
from rlhf_mc.parallel.packing import RotaryTable

# Scalings whose frequencies are the same for every sequence; of the others, one table for all would be wrong.
_ROPE_SCALINGS = ("linear", "llama3", "yarn")
_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)\.")

# Which activations the backward makes again (arXiv:2205.05198): of selective, those inside the attention; of full, all of a
# layer but its input. models/activations.py says what is left.
_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(shape: ModelShape, grid: TrainingGrid, dtype: torch.dtype, recompute: Recompute = "none") -> TransformerConfig:
    """megatron's settings for this model: no dropout, no fusion that the CPU lacks, sequence parallel with tensor parallel.

    calculate_per_token_loss makes megatron leave the loss and the gradients undivided: we divide once, by a global count.
    """
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # megatron's name for a module in the activation slot; ours is SwiGLU
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        virtual_pipeline_model_parallel_size=grid.virtual if grid.virtual > 1 else None,
        # Between chunks, two stages are both the next and the previous one of each other; sent in one batch, messages get mixed up.
        overlap_p2p_comm=grid.virtual > 1,
        batch_p2p_comm=grid.virtual == 1,
        context_parallel_size=grid.context,
        sequence_parallel=grid.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for with variable lengths, though nothing here is a mixture of experts
        calculate_per_token_loss=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **_RECOMPUTE[recompute],
    )


def layer_spec(shape: ModelShape) -> ModuleSpec:
    """One layer of megatron's local modules, with our packed attention and norm in their slots."""
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=ModuleSpec(module=PackedAttention, params={"window": shape.sliding_window}),
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm if shape.qk_norm else None,
            k_layernorm=RMSNorm if shape.qk_norm else None,
        ),
    )
    mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, activation_func=SwiGLU, linear_fc2=RowParallelLinear))
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def rotary_table(shape: ModelShape, num_positions: int, device: torch.device, key: str = "model") -> RotaryTable:
    """cos and sin of every position (arXiv:2104.09864), scaled as the model's config says. Raises ConfigError for another rope_type."""
    kind = shape.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies, scale = 1.0 / shape.rope["rope_theta"] ** exponents, 1.0
    elif kind in _ROPE_SCALINGS:
        config = PretrainedConfig(
            rope_parameters=shape.rope,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden,
            num_attention_heads=shape.num_heads,
            max_position_embeddings=shape.max_positions,
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=num_positions)
    else:
        raise ConfigError(f"{key}: rope_type={kind} is not supported; supported are default, {', '.join(_ROPE_SCALINGS)}")
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return RotaryTable((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))


class Decoder(GPTModel):
    """megatron's GPTModel, or a chunk of its layers, up to the hidden states; what is read off them is the head's business
    (models/heads.py).
    """

    def params(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter), with layers numbered as in the whole model: no two chunks share a name."""
        first = self.decoder.layers[0].layer_number - 1
        for name, param in self.named_parameters():
            yield _LAYER.sub(lambda found: f"{found[1]}{first + int(found[2])}.", name), param

    def _postprocess(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        return hidden_states


def build_chunks(
    shape: ModelShape, grid: TrainingGrid, dtype: torch.dtype, device: torch.device, tied: bool, recompute: Recompute = "none"
) -> tuple[Decoder, ...]:
    """The chunks of this rank's shard on `device`, their weights not yet set. `tied`: the output layer is the embedding.

    They share one config.
    """
    config, num_chunks = transformer_config(shape, grid, dtype, recompute), grid.pipeline * grid.virtual
    spec = TransformerBlockSubmodules(layer_specs=[layer_spec(shape)] * (shape.num_layers // num_chunks), layer_norm=RMSNorm)
    with device, cpu_tensors_pass_for_cuda(device.type != "cuda"):
        chunks = tuple(
            Decoder(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=shape.padded_vocab(grid.tensor),
                max_sequence_length=shape.max_positions,
                pre_process=chunk == 0,
                post_process=chunk == num_chunks - 1,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="none",
                vp_stage=turn if grid.virtual > 1 else None,
            )
            for turn, chunk in enumerate(grid.chunks)
        )
    for chunk in chunks:
        _mark_split_params(chunk)
    return chunks


def _mark_split_params(decoder: Decoder) -> None:
    """megatron marks split weights only when it initialises them; without the mark, the gradient norm counts one rank's part."""
    for module in decoder.modules():
        if isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding)):
            split = [(param, 0) for param in (module.weight, getattr(module, "bias", None)) if param is not None]
        elif isinstance(module, RowParallelLinear):
            split = [(module.weight, 1)]
        else:
            continue
        for param, dim in split:
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1
