"""The model as the engine sees it: which models are served, how they are loaded, their caches, their sampler."""

from phalanx.mlx_lm_adapter import register

register()
