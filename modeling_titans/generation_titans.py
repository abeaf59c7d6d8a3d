# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""How `generate()` comes to use a memory-state cache."""

from transformers.generation import GenerationMode
from transformers.utils import logging

from .cache_titans import TitansCache


logger = logging.get_logger(__name__)

CACHE_IMPLEMENTATIONS = (None, "dynamic")
ASSISTED_WITH_MEMORY = (
    "assisted decoding cannot go on from a cache that has read tokens already: generate() would feed them again. "
    "Pass the whole text without the cache, or generate without an assistant."
)


class TitansGenerationMixin:
    """Put before `GenerationMixin` in a model's bases."""

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs) -> None:
        """No positions: rows go on where the cache stands, which columns and padding do not tell (a cache may hold
        packed documents, or text at other positions). Counted anew, they would look like a document border."""

    def _valid_auto_compile_criteria(self, model_kwargs, generation_config) -> bool:
        """Decoding is compiled where ``compile_config`` asks for it, on any device, with the cache as it is."""
        if generation_config.compile_config is None or generation_config.disable_compile:
            return False
        quantizer, devices = getattr(self, "hf_quantizer", None), getattr(self, "hf_device_map", {})
        if len(set(devices.values())) > 1 or not (quantizer is None or quantizer.is_compileable):
            logger.warning_once(
                "compile_config is ignored: this model is quantized or spread in a way that prevents it"
            )
            return False
        return True

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
        num_past = 0 if cache is None else cache.get_seq_length()
        length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
        if num_past and model_kwargs.get("inputs_embeds") is None and length <= num_past:
            raise ValueError(
                f"the cache has read {num_past} columns, but input_ids and attention_mask end at column {length}: "
                f"pass the whole text, or the new tokens alone with an attention_mask of {num_past} columns more"
            )
        # An assistant's mask is guessed from its drafts, in which the padding token may stand as text.
        if num_past and mask is not None and not generation_config.is_assistant:
            _check_past(mask[:, :num_past], cache)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ) -> None:
        """Puts a `TitansCache` into ``model_kwargs``, or makes the user's own fit the rows to be generated.

        As in `forward`, a cache that is passed is used, whatever ``use_cache`` says: often that is only a `False` left
        in the config by a training script. Without this the whole text would be fed to it again for every token.
        """
        implementation = generation_config.cache_implementation
        if implementation not in CACHE_IMPLEMENTATIONS:
            raise ValueError(
                f"cache_implementation must be one of {CACHE_IMPLEMENTATIONS}, got {implementation!r}: a Titans cache "
                "has a constant size by itself and holds no keys and values"
            )
        cache = model_kwargs.get("cache")
        if cache is None:
            if generation_config.use_cache is False:
                return
            model_kwargs["cache"] = TitansCache(config=self.config)
            if generation_config.is_assistant:
                model_kwargs["cache"].activate_past_recording()
            return
        if getattr(cache, "model_type", None) != "titans":
            raise ValueError(f"cache must be a TitansCache, got {type(cache).__name__}")
        if generation_mode == GenerationMode.ASSISTED_GENERATION and cache.get_seq_length():
            raise ValueError(ASSISTED_WITH_MEMORY)
        generation_config.use_cache = True
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if copies > 1 and cache.batch_size == batch_size:
            cache.batch_repeat_interleave(copies)
        cache.check(self.config, batch_size * copies)

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(
            "continuous batching pages keys and values; a Titans memory has none. Use generate() with a padded batch."
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching


def _check_past(mask, cache) -> None:
    """A column that the memory has read as text cannot become padding afterwards."""
    rows = (mask.sum(1) < cache.progress.seen.to(mask.device)).nonzero().flatten().tolist()
    if rows:
        raise ValueError(
            f"attention_mask marks columns as padding that the cache has read as tokens, in rows {rows}: a memory "
            "cannot give back single tokens. Rows that ended early have read what generate() filled them up with; go "
            "on with the others alone (cache.batch_select_indices), or read the whole text again without the cache."
        )
