# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Titans configuration."""

import difflib
import math

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


AUTO_MAP = {
    "AutoConfig": "configuration_titans.TitansConfig",
    "AutoModel": "modeling_titans.TitansModel",
    "AutoModelForCausalLM": "modeling_titans.TitansForCausalLM",
    "AutoModelForSequenceClassification": "modeling_titans.TitansForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_titans.TitansForTokenClassification",
}

# What each field of fixed words may say.
CHOICES = {
    "variant": ("lmm", "mal", "mag", "mac"),
    "memory_gating": ("silu", "sigmoid"),
    "memory_rule": ("titans", "dla", "linear_attention", "swla"),
    "memory_gate_granularity": ("token", "chunk"),
    "memory_forget_to": ("zero", "start"),
    "memory_backend": ("auto", "triton", "chunked", "compiled", "native", "recurrent"),
    "memory_caching": (None, "residual", "grm", "soup", "ssc", "average"),
    "cache_initialization": ("checkpoint", "independent"),
    "cache_segmentation": ("constant", "logarithmic"),
    "connector": ("projection", "query"),
}

# Those whose frequencies do not depend on the length of the text.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Sizes by the number of parameters they come to with a vocabulary of 32,000: blocks, width, heads, and the MLP's width
# without and with attention. The papers give blocks, width and heads of 760m and 1.3b (Memory Caching, appendix) and
# the names of the others (Titans, section 5.1); the MLP takes what the name leaves.
PRESETS = {
    "170m": (12, 768, 16, 2944, 1920),
    "340m": (16, 1024, 16, 3712, 2304),
    "400m": (20, 1024, 16, 3520, 2176),
    "760m": (24, 1536, 16, 3136, 1088),
    "1.3b": (18, 2048, 8, 6464, 3712),
}

# Prefixes of names that belong to this model alone: an unknown one is a misspelling, not somebody's extra attribute.
OWN_PREFIXES = ("memory_", "cache_", "segment_", "sliding_", "num_persistent_", "persistent_")


@strict
class TitansConfig(PreTrainedConfig):
    r"""
    Configuration of a Titans model (arXiv 2501.00663) and of its neural long-term memory. Fields that transformers
    models share carry transformers' names and meanings; the others are:

    Args:
        variant (`str`, *optional*, defaults to `"lmm"`):
            The architecture (Titans, section 4): `"lmm"`, the memory alone; `"mal"`, memory as a layer in front of
            sliding-window attention; `"mag"`, memory as a gate of sliding-window attention; `"mac"`, memory as a
            context of attention inside segments.
        sliding_window (`int`, *optional*, defaults to 512):
            Number of keys that a token's attention sees in `mal` and `mag`: its own and the `sliding_window - 1` in
            front of it. Persistent tokens come on top. The other variants have no window.
        segment_length (`int`, *optional*, defaults to 512):
            Tokens in a segment of `mac`, a multiple of `memory_chunk_size`. Attention ends at the segment's borders.
        num_persistent_tokens (`int`, *optional*, defaults to 4):
            Learned tokens in front of every sequence, per layer (Titans section 3.3), at no position and visible to
            every token. Except in `mac` the memory reads them first too: the state behind them is the state in which
            every document starts.
        memory_gating (`str`, *optional*, defaults to `"silu"`):
            How `mag` and `mac` combine attention y and memory m, which the paper leaves open (Titans eq. 25 and 28):
            RMSNorm(y) * SiLU(RMSNorm(m)), or with the logistic function for `"sigmoid"`.
        memory_num_heads (`int`, *optional*):
            Independent memories per layer; defaults to `num_attention_heads`.
        memory_head_dim (`int`, *optional*):
            Width of a memory's keys and values; defaults to `hidden_size // memory_num_heads`.
        memory_depth (`int`, *optional*, defaults to 2):
            Layers of a memory network, >= 1; 1 is a matrix memory.
        memory_expansion (`int`, *optional*, defaults to 4):
            Width of the network's hidden layers in units of `memory_head_dim`.
        memory_chunk_size (`int`, *optional*, defaults to 64):
            Tokens whose inner gradients are taken at the same weights (Titans eq. 16). Smaller chunks follow the
            sequence more closely and cost more time and memory.
        memory_rule (`str`, *optional*, defaults to `"titans"`):
            How the memory learns, and with which of the gates theta (step size), alpha (forgetting) and eta; fields of
            gates that a rule has not are without effect. `"titans"`: by gradients of |M(k) - v|^2, with theta, alpha
            and eta, the decay of past surprise. `"dla"` (Memory Caching eq. 30): by gradients of -<M(k), v>, with
            theta; `memory_depth` >= 2. `"linear_attention"` (Titans eq. 4): a matrix adds up pairs, without gates.
            `"swla"` (Memory Caching eq. 28): a matrix that adds the pairs of the last two tokens at each token, its
            own with theta, the one before with eta, both up to `memory_max_lr` (without `memory_momentum` its own
            alone), and forgets by alpha. The last two need `memory_depth=1`, `memory_residual=False` and
            `memory_norm=False`, and start at zero weights.
        memory_momentum (`bool`, *optional*, defaults to `True`):
            Whether past surprise is carried on (Titans eq. 10). If not, eta = 0.
        memory_forgetting (`bool`, *optional*, defaults to `True`):
            Whether the memory forgets (Titans eq. 13). If not, alpha = 0.
        memory_gate_granularity (`str`, *optional*, defaults to `"token"`):
            `"token"`: each token has its own step size, forgetting and momentum decay. `"chunk"`: all tokens of a
            chunk use those of the chunk's first token (Titans section 3.2).
        memory_max_lr (`float`, *optional*, defaults to 1.0):
            Upper bound of the inner step size theta.
        memory_max_forget (`float`, *optional*, defaults to 0.5):
            Upper bound of alpha, < 1: at zero weights a memory of two or more layers has no gradient and stays dead.
        memory_forget_to (`str`, *optional*, defaults to `"zero"`):
            Where forgetting leads: `"zero"` (the paper) or `"start"`, the learned start weights.
        memory_backend (`str`, *optional*, defaults to `"auto"`):
            What computes the memory: `"triton"` (fused kernels), `"chunked"` (PyTorch), `"compiled"` (the same, each
            span of chunks through `torch.compile`: for long training on a CPU), `"native"` (the same in C++ on a CPU,
            faster, and whole blocks at decoded tokens; compiled on first use, which needs a C++ compiler and the
            installed package), `"recurrent"` (token by token, to check the others); `"auto"` is `"triton"` on a GPU
            where it takes the sizes and is installed, else `"chunked"`. One asked for by name is never replaced by
            another. `"triton"` and `"native"` do not read `memory_caching="soup"`.
        memory_residual (`bool`, *optional*, defaults to `True`):
            Whether the memory network adds its input to its output.
        memory_norm (`bool`, *optional*, defaults to `True`):
            Whether the memory network normalises its result (LayerNorm, before the residual is added).
        memory_conv_kernel_size (`int`, *optional*, defaults to 4):
            Width of the causal depthwise convolution on queries, keys and values; 0 for none.
        memory_caching (`str`, *optional*):
            How the memories kept at the ends of segments are read beside the running one (Memory Caching, arXiv
            2602.24281): `"residual"`, their sum; `"grm"`, a sum gated by how well token and segment fit; `"soup"`,
            one network of gated weights; `"ssc"`, as `"grm"` of the `cache_top_k` that fit best; `"average"`, their
            mean, without parameters, for a model trained without caching. `None` for no caching.
        cache_segment_length (`int`, *optional*, defaults to 256):
            Tokens in a caching segment, a multiple of `memory_chunk_size`.
        cache_initialization (`str`, *optional*, defaults to `"checkpoint"`):
            What a caching segment starts from: `"checkpoint"`, the memory at the end of the last one; `"independent"`,
            the start state, in training all segments at once.
        cache_segmentation (`str`, *optional*, defaults to `"constant"`):
            `"constant"`: a memory is kept for each segment. `"logarithmic"`: for each binary digit of their number
            (37 = 32 + 4 + 1), of a block of so many segments; with `"grm"` this is Log-Linear++.
        cache_top_k (`int`, *optional*, defaults to 2):
            Kept memories that each token and head reads with `memory_caching="ssc"`, beside the running one.
        cache_max_segments (`int`, *optional*):
            At most so many memories are kept, and the oldest one is dropped for the next; `None` for no bound. Only
            for constant segmentation: logarithmic segmentation keeps one for each binary digit.
        connector (`str`, *optional*, defaults to `"projection"`):
            How a token is compared with segments in `grm`, `soup` and `ssc` (Memory Caching eq. 10): by a learned
            projection of its own, or by its `"query"`, which needs no parameters.

    Raises:
        StrictDataclassError: (huggingface_hub's) if a field has a type or value that is not allowed.
        ValueError: for unknown names that begin like a field of this model.

    ```python
    >>> from transformers_titans import TitansConfig, TitansForCausalLM

    >>> config = TitansConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4)
    >>> model = TitansForCausalLM(config)
    ```
    """

    model_type = "titans"
    keys_to_ignore_at_inference = ["cache", "surprise"]

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    variant: str = "lmm"
    sliding_window: int = 512
    segment_length: int = 512
    num_persistent_tokens: int = 4
    memory_gating: str = "silu"
    memory_num_heads: int | None = None
    memory_head_dim: int | None = None
    memory_depth: int = 2
    memory_expansion: int = 4
    memory_chunk_size: int = 64
    memory_rule: str = "titans"
    memory_momentum: bool = True
    memory_forgetting: bool = True
    memory_gate_granularity: str = "token"
    memory_max_lr: float | int = 1.0
    memory_max_forget: float | int = 0.5
    memory_forget_to: str = "zero"
    memory_backend: str = "auto"
    memory_residual: bool = True
    memory_norm: bool = True
    memory_conv_kernel_size: int = 4
    memory_caching: str | None = None
    cache_segment_length: int = 256
    cache_initialization: str = "checkpoint"
    cache_segmentation: str = "constant"
    cache_top_k: int = 2
    cache_max_segments: int | None = None
    connector: str = "projection"

    def __post_init__(self, **kwargs):
        _refuse_misspelled(kwargs, type(self).__dataclass_fields__)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.memory_num_heads is None:
            self.memory_num_heads = self.num_attention_heads
        if self.memory_head_dim is None:
            self.memory_head_dim = self.hidden_size // max(self.memory_num_heads, 1)
        super().__post_init__(**kwargs)
        # `save_pretrained` enters only the class that saves; a checkpoint must name them all to load anywhere.
        self.auto_map = {**AUTO_MAP, **(getattr(self, "auto_map", None) or {})}

    @classmethod
    def from_preset(cls, size: str, variant: str = "mac", **fields) -> "TitansConfig":
        """The configuration of one of the papers' model sizes.

        Args:
            size: "170m", "340m", "400m", "760m" (Titans) or "1.3b" (Memory Caching).
            variant: the architecture.
            fields: any other fields; they take precedence over the preset's.

        Raises:
            ValueError: for an unknown size.
        """
        if size not in PRESETS:
            raise ValueError(f"size must be one of {tuple(PRESETS)}, got {size!r}")
        num_layers, width, num_heads, *intermediate = PRESETS[size]
        preset = {
            "num_hidden_layers": num_layers,
            "hidden_size": width,
            "num_attention_heads": num_heads,
            "intermediate_size": intermediate[variant != "lmm"],
        }
        return cls(variant=variant, **(preset | fields))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in transformers, except that `variant` among the arguments of an Auto class is left to the model.

        There it means what it means for every model, which weight files to load (`variant="fp16"`), and must not
        replace this config's field of that name. A config by itself takes it as any other field.
        """
        returns_unused = kwargs.get("return_unused_kwargs", False)
        weights_variant = {"variant": kwargs.pop("variant")} if returns_unused and "variant" in kwargs else {}
        result = super().from_dict(config_dict, **kwargs)
        if returns_unused:
            config, unused = result
            return config, unused | weights_variant
        result.validate()
        return result

    def validate_choices(self):
        """Part of `@strict`-powered validation: fields of fixed words."""
        for name in CHOICES:
            self._validate_choice(name)

    def _validate_choice(self, name: str) -> None:
        if getattr(self, name) not in CHOICES[name]:
            raise ValueError(f"{name} must be one of {CHOICES[name]}, got {getattr(self, name)!r}")

    def validate_sizes(self):
        """Part of `@strict`-powered validation: numbers and their lower bounds."""
        bounds = {
            1: (
                "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
                " memory_num_heads memory_head_dim head_dim sliding_window segment_length memory_depth"
                " memory_expansion memory_chunk_size cache_segment_length cache_top_k"
            ),
            0: "num_persistent_tokens memory_conv_kernel_size",
        }
        for least, names in bounds.items():
            for name in names.split():
                if getattr(self, name) < least:
                    raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")

    def validate_attention(self):
        """Part of `@strict`-powered validation: heads, rotary embedding, dropout, segments."""
        if self.num_attention_heads % max(self.num_key_value_heads, 1):
            raise ValueError(
                f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if self.variant != "lmm" and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be >= 0 and < 1, got {self.attention_dropout}")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_parameters['rope_type'] must be one of {ROPE_TYPES}, got {rope_type!r}")
        for name, value in (self.rope_parameters or {}).items():
            if name == "partial_rotary_factor" and value != 1.0:
                raise ValueError(f"rope_parameters['partial_rotary_factor'] must be 1.0, got {value!r}")
            if name == "rope_theta" and not value > 0 or name == "factor" and not value >= 1:
                least = "> 0" if name == "rope_theta" else ">= 1"
                raise ValueError(f"rope_parameters[{name!r}] must be {least}, got {value!r}")
        if self.variant == "mac" and self.segment_length % max(self.memory_chunk_size, 1):
            raise ValueError(
                f"segment_length must be a multiple of memory_chunk_size={self.memory_chunk_size} in variant 'mac', "
                f"got {self.segment_length}"
            )

    def validate_memory(self):
        """Part of `@strict`-powered validation: the ranges of the memory's gates, and what its rule needs."""
        if not 0 < self.memory_max_lr < math.inf:
            raise ValueError(f"memory_max_lr must be > 0 and finite, got {self.memory_max_lr}")
        if not 0 < self.memory_max_forget < 1:
            raise ValueError(f"memory_max_forget must be > 0 and < 1, got {self.memory_max_forget}")
        if self.cache_max_segments is not None:
            if self.cache_max_segments < 1:
                raise ValueError(f"cache_max_segments must be >= 1 or None, got {self.cache_max_segments}")
            if self.cache_segmentation != "constant":
                raise ValueError(
                    f"cache_max_segments must be None with cache_segmentation={self.cache_segmentation!r}, "
                    f"which keeps few memories as it is, got {self.cache_max_segments}"
                )
        if self.memory_rule == "dla" and self.memory_depth < 2:
            raise ValueError(
                f"memory_rule='dla' needs memory_depth >= 2, got {self.memory_depth}; at depth 1 take "
                "'linear_attention' or 'swla'"
            )
        if self.memory_rule in ("linear_attention", "swla"):
            for name, needed in (("memory_depth", 1), ("memory_residual", False), ("memory_norm", False)):
                if getattr(self, name) != needed:
                    raise ValueError(
                        f"memory_rule={self.memory_rule!r} needs {name}={needed}, got {getattr(self, name)}; set "
                        "memory_depth=1, memory_residual=False, memory_norm=False"
                    )

    def validate_caching(self):
        """Part of `@strict`-powered validation: what memory caching needs, also where a loaded model is switched."""
        if self.memory_caching is None:
            return
        for name in ("memory_caching", "cache_initialization", "cache_segmentation", "connector"):
            self._validate_choice(name)
        if self.cache_segment_length % max(self.memory_chunk_size, 1):
            raise ValueError(
                f"cache_segment_length must be a multiple of memory_chunk_size={self.memory_chunk_size}, "
                f"got {self.cache_segment_length}"
            )
        if self.memory_caching == "soup" and self.memory_backend in ("triton", "native"):
            allowed = tuple(name for name in CHOICES["memory_backend"] if name not in ("triton", "native"))
            raise ValueError(
                f"memory_backend must be one of {allowed} with memory_caching='soup', got {self.memory_backend!r}"
            )


def _refuse_misspelled(names, fields) -> None:
    for name in names:
        if name.startswith(OWN_PREFIXES):
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            known = [field for field in fields if field.startswith(OWN_PREFIXES)]
            raise ValueError(f"TitansConfig has no field {name!r}{hint} Fields of this kind: {known}")


__all__ = ["TitansConfig"]
