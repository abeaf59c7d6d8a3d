# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Titans models: blocks around the neural memory, in the form of transformers' own models (arXiv 2501.00663)."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import initialization as init
from transformers.generation import CompileConfig, GenerationMixin
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.output_capturing import capture_outputs

from .attention_titans import TitansRotaryEmbedding, check_implementation, returns_weights
from .cache_titans import TitansCache
from .call_plan import Columns, Progress, plan_columns
from .compiled_decoding import BlocksReader, compiled_reader, read_blocks
from .configuration_titans import TitansConfig
from .decoder_layer import TitansDecoderLayer
from .generation_titans import TitansGenerationMixin
from .layer_plan import plan_layers
from .layer_state import Sealed
from .memory_layer import TitansRMSNorm
from .native_blocks import native_reader


# While a cache records its past, a call longer than LONG_CALL keeps a state ROLLBACK columns before its end: a crop
# after the prefill of a long prompt then reads few columns again, not the whole prompt.
LONG_CALL, ROLLBACK = 256, 128


@dataclass
class TitansModelOutput(BaseModelOutputWithPast):
    """`BaseModelOutputWithPast` with the layers' surprise.

    Attributes:
        surprise: with ``output_surprise=True`` one tensor (B, T, memory_num_heads) per layer: each token's inner loss
            |M(k) - v|^2 at the weights of its chunk's start (Titans, eq. 12); 0 at masked tokens.
    """

    surprise: tuple[torch.Tensor, ...] | None = None


@dataclass
class TitansCausalLMOutput(CausalLMOutputWithPast):
    """`CausalLMOutputWithPast` with the layers' surprise, see `TitansModelOutput`."""

    surprise: tuple[torch.Tensor, ...] | None = None


class TitansPreTrainedModel(PreTrainedModel):
    """Weights' initialisation, and what transformers may do with a Titans model."""

    config: TitansConfig
    config_class = TitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TitansDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _is_stateful = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _can_record_outputs = {"hidden_states": TitansDecoderLayer}

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs) -> str:
        applicable = super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)
        check_implementation(applicable)
        return applicable

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if hasattr(module, "initialise"):
            module.initialise(init)


class TitansModel(TitansPreTrainedModel):
    """Embeddings, blocks and a final norm.

    Args:
        config: a `TitansConfig`.
    """

    def __init__(self, config: TitansConfig):
        # Fields may have been assigned since the config was made.
        config.validate()
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [TitansDecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        self.norm = TitansRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = None if config.variant == "lmm" else TitansRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        output_surprise: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TitansModelOutput:
        """Reads T tokens of B rows.

        Args:
            input_ids: (B, T) token ids; or give ``inputs_embeds`` (B, T, hidden_size).
            attention_mask: (B, T), or with all columns that the cache has read in front; 0 marks padding, which
                changes nothing, wherever it stands. None: no padding.
            position_ids: (B, T). A real token whose position is not its predecessor's + 1 begins a document: the row
                goes back to the learned start state. None: each row goes on.
            cache: the memory of what was read before; it is advanced in place. None: every row starts afresh.
            use_cache: whether to make a cache; None: `config.use_cache`, but none where a backward may follow. A
                cache that is passed is always advanced, once, also under gradient checkpointing; the reentrant kind
                cuts the gradient through the states.
            output_surprise: whether to return `TitansModelOutput.surprise`.
            kwargs: ``cu_seq_lens_q`` or ``seq_idx``: document borders as transformers' padding-free collators give
                them; ``output_hidden_states``, ``return_dict``; ``output_attentions``, with eager attention: the
                weights of `mal` and `mag` (B, num_attention_heads, T, kept + T) per layer, over the keys kept from
                earlier calls and the call's own; persistent tokens have the rest. None in the other variants.

        Raises:
            ValueError: naming the argument, its value and what is allowed, before anything changes.
        """
        output_attentions = returns_weights(self.config, kwargs.get("output_attentions"))
        inputs_embeds = self._embed(input_ids, inputs_embeds)
        batch_size, num_columns = inputs_embeds.shape[:2]
        if use_cache is None:
            use_cache = self.config.use_cache and not (self.training and torch.is_grad_enabled())
        if cache is None and use_cache:
            cache = TitansCache(config=self.config)
        progress, num_past = None, 0
        if cache is not None:
            _check_cache(cache, self.config, batch_size)
            progress = cache.progress or Progress.start(batch_size, inputs_embeds.device)
            num_past = cache.get_seq_length()
        columns = plan_columns(
            (batch_size, num_columns),
            inputs_embeds.device,
            progress,
            num_past,
            attention_mask,
            position_ids,
            kwargs.get("cu_seq_lens_q"),
            kwargs.get("seq_idx"),
        )
        if cache is not None and cache.needs_replay:
            self._replay(cache)
        wanted = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        # An index may be 0.
        capture = output_attentions or not (wanted is None or wanted is False)
        if cache is None or not cache.is_recording or num_columns <= LONG_CALL or capture:
            hidden_states, surprise, attentions = self._read(
                inputs_embeds,
                columns,
                cache,
                output_surprise,
                output_attentions,
                None if capture or torch.is_grad_enabled() else kwargs.get("reader") or native_reader(self.config),
            )
        else:
            hidden_states, surprise = self._read_with_mark(inputs_embeds, columns, cache, output_surprise)
            attentions = None
        return TitansModelOutput(
            last_hidden_state=self.norm(hidden_states),
            cache=cache,
            attentions=attentions if output_attentions else None,
            surprise=surprise if output_surprise else None,
        )

    def _read(
        self,
        hidden_states,
        columns: Columns | None,
        cache,
        output_surprise: bool,
        output_attentions: bool = False,
        reader: BlocksReader | None = None,
    ):
        """All blocks over (B, T, hidden_size), then the cache's advance.

        ``reader``: another form of `read_blocks`, in C++ or compiled. Returns the stream, and for each layer its
        inner losses and attention weights.
        """
        blocks = self._blocks()
        held = [None] * len(blocks) if cache is None else [kept.sealed for kept in cache.layers]
        states = [Sealed(None) if state is None else state for state in held]
        plan = self._plan(hidden_states, columns, states[0])
        read = read_blocks
        if reader is not None and reader.fits(hidden_states, plan.content, states[0]):
            read = reader.read
        streams, outputs = read(blocks, hidden_states, states, plan, output_surprise, output_attentions)
        if cache is not None:
            inputs = streams[:-1] if cache.is_recording else [None] * len(outputs)
            cache.advance(columns, [output[1] for output in outputs], inputs)
        return streams[-1], tuple(output[2] for output in outputs), tuple(output[3] for output in outputs)

    def _blocks(self) -> nn.ModuleList:
        """The blocks to read with: all of them, except while `generate(assistant_early_exit=...)` drafts with the
        first ones, which it says in the config. A slice is another object, which would be compiled anew."""
        number = self.config.num_hidden_layers
        return self.layers if number == len(self.layers) else self.layers[:number]

    def _plan(self, hidden_states, columns: Columns | None, state: Sealed) -> Sealed:
        """The `LayerPlan` of a call that begins where a layer has this state."""
        return Sealed(plan_layers(self.config, hidden_states, columns, state.counts, self.rotary_emb))

    def _read_with_mark(self, hidden_states, columns: Columns, cache: TitansCache, output_surprise: bool):
        """`_read` in two calls with a mark between them, so that a crop near the end of a long call is cheap."""
        parts = []
        for at in (slice(None, -ROLLBACK), slice(-ROLLBACK, None)):
            parts.append(self._read(hidden_states[:, at], columns.part(at), cache, output_surprise))
            if at.stop is not None:
                cache.mark()
        hidden_states, surprises, _ = zip(*parts, strict=True)
        surprise = None
        if output_surprise:
            surprise = tuple(torch.cat(layer, 1) for layer in zip(*surprises, strict=True))
        return torch.cat(hidden_states, 1), surprise

    def _embed(self, input_ids, inputs_embeds) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is not None:
            width = self.config.hidden_size
            if not torch.is_tensor(inputs_embeds) or not inputs_embeds.is_floating_point():
                raise ValueError(f"inputs_embeds must be a floating-point tensor, got {_kind(inputs_embeds)}")
            if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != width or 0 in inputs_embeds.shape:
                raise ValueError(
                    f"inputs_embeds must be (batch_size, length, hidden_size={width}) with at least one token, "
                    f"got {tuple(inputs_embeds.shape)}"
                )
            return inputs_embeds
        if not torch.is_tensor(input_ids) or input_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"input_ids must be a tensor of int64 or int32, got {_kind(input_ids)}")
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"input_ids must be (batch_size, length) with at least one row and one token, "
                f"got {tuple(input_ids.shape)}"
            )
        try:
            return self.embed_tokens(input_ids)
        except IndexError as error:
            # Looked at only behind a failure: a check of each token's id costs a good part of what its embedding does,
            # and on an accelerator would wait for the device; there the embedding itself asserts.
            number, (least, most) = self.embed_tokens.num_embeddings, (t.item() for t in input_ids.aminmax())
            if 0 <= least and most < number:
                raise
            raise ValueError(
                f"input_ids must be in [0, vocab_size={number}), got {least if least < 0 else most}: "
                "does the tokenizer belong to this model?"
            ) from error

    def _replay(self, cache: TitansCache) -> None:
        """After a crop: rebuilds the states from the recorded inputs that are left."""
        offset, base = cache.layers[0].marks[-1]
        plan = self._plan(cache.layers[0].inputs[:, offset:], cache.columns_to_replay(), Sealed(base))
        states = [
            layer(kept.inputs[:, offset:], state=Sealed(kept.marks[-1][1]), plan=plan, only_state=True)[1].content
            for layer, kept in zip(self._blocks(), cache.layers, strict=True)
        ]
        cache.replayed(states)


def _kind(value) -> str:
    return str(value.dtype) if torch.is_tensor(value) else type(value).__name__


def _check_cache(cache, config: TitansConfig, batch_size: int) -> None:
    if getattr(cache, "model_type", None) != "titans":
        raise ValueError(
            f"cache must be a TitansCache, got {type(cache).__name__}: a memory's state does not fit into keys and "
            "values. Pass none to have one made, or TitansCache(config)."
        )
    cache.check(config, batch_size)


class TitansForCausalLM(TitansPreTrainedModel, TitansGenerationMixin, GenerationMixin):
    """A Titans model with a language modelling head.

    Args:
        config: a `TitansConfig`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TitansConfig):
        super().__init__(config)
        self.model = TitansModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_compiled_call(self, compile_config: CompileConfig | None) -> Callable:
        """What to call instead of the model to decode, token by token, with a cache: `generate()` does so where it is
        given a ``compile_config``. Compiling begins at the third token of a chunk and takes minutes on a CPU.
        """
        compile_config = compile_config or CompileConfig()
        known = getattr(self, "_compiled_reader", None)
        if known is None or known[0] != compile_config:
            self._compiled_reader = known = (compile_config, compiled_reader(compile_config, self.device))
        return functools.partial(self, reader=known[1])

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: TitansCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_surprise: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TitansCausalLMOutput:
        """Reads T tokens of B rows and predicts the next ones.

        Args:
            labels: (B, T) targets, shifted inside the model; -100 is ignored. With labels no cache is made unless
                asked for. A batch without a single target has loss 0.
            logits_to_keep: number of last columns (0: all), or their indices, to compute logits for.
            kwargs: ``num_items_in_batch`` and other arguments of transformers' loss function, and those of
                `TitansModel.forward`, where the other arguments are described.
        """
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_surprise=output_surprise,
            **kwargs,
        )
        slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, slice_indices, :])
        loss = None
        if labels is not None:
            kwargs["num_items_in_batch"] = _num_targets(labels, **kwargs)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return TitansCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            surprise=outputs.surprise,
        )


def _num_targets(labels, num_items_in_batch=None, shift_labels=None, ignore_index=-100, **kwargs):
    """The loss's divisor: at least 1, so that a batch of padding alone gives 0 and not 0 / 0."""
    if num_items_in_batch is None:
        targets = labels[..., 1:] if shift_labels is None else shift_labels
        num_items_in_batch = (targets != ignore_index).sum()
    return num_items_in_batch.clamp(min=1) if torch.is_tensor(num_items_in_batch) else max(num_items_in_batch, 1)


class TitansForSequenceClassification(GenericForSequenceClassification, TitansPreTrainedModel):
    """A Titans model with a classifier on each row's last token."""

    def __init__(self, config: TitansConfig):
        # transformers' mixin would ask AutoModel for the base model, which in a checkpoint's own code it may not load.
        TitansPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class TitansForTokenClassification(GenericForTokenClassification, TitansPreTrainedModel):
    """A Titans model with a classifier on every token."""

    def __init__(self, config: TitansConfig):
        TitansPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.dropout = nn.Dropout(0.1)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


__all__ = [
    "TitansForCausalLM",
    "TitansForSequenceClassification",
    "TitansForTokenClassification",
    "TitansModel",
    "TitansPreTrainedModel",
]
