"""rlhf_mc: RLHF in one torchrun program. megatron-core trains and scores, vLLM samples, in the same processes."""
