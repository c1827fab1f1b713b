"""Coupled Adam in LLM Foundry: ``optimizer: {name: coupled_adamw, vocab_size: 50368, lr: ...}``.

Import this file with ``code_paths: [llm_foundry_optimizer.py]`` in the YAML file.
"""

from llmfoundry.registry import optimizers

from coupled_adam import CoupledAdamW

# LLM Foundry passes the parameters and the options: vocab_size finds the embeddings.
optimizers.register("coupled_adamw", func=CoupledAdamW)
