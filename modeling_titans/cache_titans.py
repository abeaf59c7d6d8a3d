# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The memory-state cache: stands where a transformers KV cache would, with a size that does not grow with the text."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from .call_plan import Columns, Progress
from .layer_state import VARIANT_GEOMETRY, Sealed, TitansLayerState
from .memory_state import iterate_leaves, iterate_tensors, map_tensors
from .state_loading import counts_of, state_from_tensors


CACHE_FILE = "titans_cache.safetensors"
FORMAT = "titans_cache/1"


class TitansCacheLayer(CacheLayerMixin):
    """One block's state, and while past recording is on the layer's inputs since a state to go back to.

    Attributes:
        sealed: `state` as blocks take and give it, or None where there is none.
        inputs: (B, R, hidden_size) inputs of the block since recording began, or None.
        marks: states on the way, each with the number of inputs before it; the first one is where recording began.
            None stands for the start state.
        columns: columns fed, padding included.
        record_past: whether inputs are being kept.
        kept_device: where the weights of kept memories lie, or None: with the others.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self):
        super().__init__()
        self.sealed: Sealed | None = None
        self.inputs: torch.Tensor | None = None
        self.marks: list[tuple[int, TitansLayerState | None]] = [(0, None)]
        self.columns = 0
        self.record_past = False
        self.kept_device: torch.device | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise NotImplementedError("a Titans layer's state is initialised by its first forward")

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        raise NotImplementedError("a Titans block hands its whole state over, it does not update keys and values")

    @property
    def state(self) -> TitansLayerState | None:
        """The state after all columns fed; None before the first, or after a crop until the next forward has rebuilt
        it."""
        return None if self.sealed is None else self.sealed.content

    @state.setter
    def state(self, state: TitansLayerState | None) -> None:
        self.sealed = None if state is None else Sealed(state)

    @property
    def needs_replay(self) -> bool:
        """Whether a crop has left inputs that the memory must read again."""
        return self.sealed is None and self.inputs is not None

    def advance(self, state: Sealed, num_columns: int, inputs: torch.Tensor | None) -> None:
        """Stores the state after a call; ``inputs`` (B, T, hidden_size) are needed while past recording is on."""
        self.sealed = state if state.is_owned else Sealed(self._settled(state.content))
        self.columns += num_columns
        self.is_initialized = True
        if self.record_past:
            inputs = _owned(inputs.detach())
            self.inputs = inputs if self.inputs is None else torch.cat([self.inputs, inputs], 1)
        else:
            self.rebase()

    def mark(self) -> None:
        """Keeps the present state, so that going back to a later point starts here."""
        self.marks.append((self.inputs.shape[1], self.state))

    def rebase(self) -> None:
        """Recording begins at the present state."""
        self.marks, self.inputs = [(0, self.state if self.record_past else None)], None

    def replayed(self, state: TitansLayerState) -> None:
        """Stores the state that reading the inputs behind the last mark again has given."""
        self.state = self._settled(state)
        self.rebase()

    def _settled(self, state: TitansLayerState) -> TitansLayerState:
        state = map_tensors(_owned, state)
        if self.kept_device is None or state.memory.kept is None:
            return state
        memory, segment = (
            part and part._replace(kept=part.kept.weights_to(self.kept_device))
            for part in (state.memory, state.segment)
        )
        return state._replace(memory=memory, segment=segment)

    def activate_past_recording(self) -> None:
        if not self.record_past:
            self.record_past = True
            self.rebase()

    def crop(self, tokens_to_remove: int) -> None:
        self.columns += tokens_to_remove
        if tokens_to_remove == 0:
            if not self.needs_replay:
                self.rebase()
            return
        left = self.inputs.shape[1] + tokens_to_remove
        self.marks = [mark for mark in self.marks if mark[0] <= left]
        if self.marks[-1][0] == left:
            self.state = self.marks[-1][1]
            self.rebase()
        else:
            self.state, self.inputs = None, self.inputs[:, :left].contiguous()

    def reset(self) -> None:
        self.state = None
        self.rebase()
        self.columns = 0
        self.is_initialized = False

    def map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Applies ``fn`` to every tensor of the layer."""
        self.state, self.inputs = map_tensors(fn, (self.state, self.inputs))
        self.marks = [(offset, map_tensors(fn, state)) for offset, state in self.marks]

    def tree(self) -> tuple:
        """All tensors of the layer."""
        return self.state, self.inputs, tuple(state for _, state in self.marks)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.map(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        self.device = next((t.device for _, t in iterate_tensors(self.tree())), None)
        self.map(lambda t: t.to("cpu"))

    def prefetch(self) -> None:
        if getattr(self, "device", None) is not None:
            self.map(lambda t: t.to(self.device))

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0


class TitansCache(DynamicCache):
    """The memory of a sequence: what each layer has learned from the tokens so far.

    Made by `generate()` or by a forward with ``use_cache=True``, passed back as ``cache=``; a call advances it in
    place. Its size does not depend on how many tokens it has read, except for the memories that memory caching keeps:
    one for each segment, or for each binary digit of their number, or at most `cache_max_segments`, and then the
    oldest one is dropped for the next. It can be rolled back (`crop`) to any point after
    `activate_past_recording`, exactly; reordered, repeated and selected by rows; detached, copied
    (`copy.deepcopy`), moved, and kept on disk.

    Args:
        config: the model's `TitansConfig`.
        kept_device: where the weights of kept memories lie after each call, for instance "cpu" to leave a GPU's memory
            to the rest: they are moved where they are read, with `memory_caching="ssc"` only those that a token has
            selected. None: with everything else.

    Attributes:
        progress: tokens seen and last position of each row, or None before the first call.
        geometry: the config fields on which the cache's shape and meaning depend.
    """

    model_type = "titans"

    def __init__(self, config, kept_device: str | torch.device | None = None):
        self._setup({name: getattr(config, name) for name in VARIANT_GEOMETRY[config.variant]}, kept_device)

    def _setup(self, geometry: dict, kept_device: str | torch.device | None) -> None:
        layers = [TitansCacheLayer() for _ in range(geometry["num_hidden_layers"])]
        if kept_device is not None:
            for layer in layers:
                layer.kept_device = torch.device(kept_device)
        # Past DynamicCache's constructor, which would build layers of keys and values.
        super(DynamicCache, self).__init__(layers=layers)
        self.geometry = geometry
        self.progress: Progress | None = None
        self.base_progress: Progress | None = None
        self.recorded: Columns | None = None

    @property
    def batch_size(self) -> int:
        """Number of rows, -1 before the first call."""
        return -1 if self.progress is None else self.progress.seen.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the states, each counted once. Constant in the number of tokens read, unless past
        recording is on, or memory caching: then `kept_nbytes` of it grow."""
        return _nbytes(t for _, t in iterate_tensors(self._tree()))

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the memories that memory caching has kept, and of their keys."""
        return _nbytes(t for name, t in iterate_tensors(self._tree()) if ".kept." in name)

    @property
    def is_recording(self) -> bool:
        return self.layers[0].record_past

    def check(self, config, batch_size: int | None = None) -> None:
        """Raises a ValueError if this is the cache of a differently built model, or of another number of rows."""
        # Past transformers' way to look fields up, which would take longer than all else.
        fields = vars(config)
        for name, value in self.geometry.items():
            if fields[name] != value:
                raise ValueError(f"cache was made by a model with {name}={value!r}; this model has {fields[name]!r}")
        if batch_size is not None and self.batch_size not in (-1, batch_size):
            raise ValueError(f"cache is of {self.batch_size} rows, the input of {batch_size}")

    def advance(self, columns: Columns, states: list[Sealed], inputs: list) -> None:
        """Stores what a call has left in every layer, all at once at its end: a call that fails changes nothing."""
        progress = self.progress
        if progress is None:
            progress = Progress.start(columns.mask.shape[0], columns.mask.device)
        if not self.is_recording:
            self.recorded = self.base_progress = None
        elif self.recorded is None:
            self.recorded, self.base_progress = columns, progress
        else:
            self.recorded = self.recorded.followed_by(columns)
        for layer, state, layer_inputs in zip(self.layers, states, inputs, strict=True):
            layer.advance(state, columns.mask.shape[1], layer_inputs)
        self.progress = columns.advance(progress)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last ``-tokens_to_remove`` columns, exactly: what follows is as if they had not been fed.

        Columns can be taken back as far as to where recording began: at `activate_past_recording`, and anew at
        ``crop(0)`` and at the first call after any other `crop`, in which the memory reads the recorded columns that
        are left once more.

        Args:
            tokens_to_remove: 0 or a negative number of columns.

        Raises:
            ValueError: for a positive number, or more columns than have been fed.
            RuntimeError: if the columns were not recorded.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise ValueError(
                f"tokens_to_remove must be between {-self.get_seq_length()} and 0 (a number of tokens to remove, "
                f"negated), got {tokens_to_remove}"
            )
        available = 0 if self.recorded is None else self.recorded.mask.shape[1]
        if -tokens_to_remove > available:
            raise RuntimeError(
                f"cannot take back {-tokens_to_remove} columns: {available} have been recorded. "
                "Call cache.activate_past_recording() before feeding columns that may have to be taken back."
            )
        if tokens_to_remove == -available:
            self.progress = self.base_progress if available else self.progress
        elif tokens_to_remove:
            self.recorded = self.recorded.part(slice(None, tokens_to_remove))
            self.progress = self.recorded.advance(self.base_progress)
        for layer in self.layers:
            layer.crop(tokens_to_remove)
        if not self.needs_replay:
            self.recorded = self.base_progress = None

    @property
    def needs_replay(self) -> bool:
        return self.layers[0].needs_replay

    def mark(self) -> None:
        """While recording: keeps the present states, so that a crop to a later point has less to read again."""
        for layer in self.layers:
            layer.mark()

    def columns_to_replay(self) -> Columns:
        """The columns behind the last mark, which the layers have to read again."""
        return self.recorded.part(slice(self.layers[0].marks[-1][0], None))

    def replayed(self, states: list[TitansLayerState]) -> None:
        """Stores the states that the layers have rebuilt from their recorded inputs."""
        for layer, state in zip(self.layers, states, strict=True):
            layer.replayed(state)
        self.recorded = self.base_progress = None

    def reset(self) -> None:
        """Forgets everything: the next call starts from the model's start state."""
        super().reset()
        self.progress = self.base_progress = self.recorded = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._map_rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_rows(lambda t: t[indices.to(t.device)])

    def detach(self) -> "TitansCache":
        """Cuts the graph behind the states, in place, so that gradients stop here."""
        for layer in self.layers:
            layer.map(torch.Tensor.detach)
        return self

    def to(self, device) -> "TitansCache":
        """Moves all tensors to ``device``, in place (None: nowhere). Dtypes stay: a state is never narrowed."""
        if device is None:
            return self
        device = torch.device(device)
        for layer in self.layers:
            layer.map(lambda t: t.to(device))
        self._map_rows(lambda t: t.to(device))
        return self

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Writes the cache to ``save_directory/titans_cache.safetensors``.

        The file appears whole or not at all; one that was there before stays until the new one is complete.

        Raises:
            ValueError: if the cache is empty, or ``save_directory`` is a file.
        """
        directory = Path(save_directory)
        if self.progress is None:
            raise ValueError("the cache is empty: there is no memory to save before the first call")
        if directory.is_file():
            raise ValueError(f"save_directory must be a directory, but {directory} is a file")
        directory.mkdir(parents=True, exist_ok=True)
        held, owners = dict(iterate_tensors(self._tree())), {}
        names = {name: owners.setdefault(_place(t), name) for name, t in held.items()}
        tensors = {name: held[name].detach().to("cpu", copy=True).contiguous() for name in owners.values()}
        meta = {
            "geometry": self.geometry,
            "columns": self.get_seq_length(),
            "recording": self.is_recording,
            "marks": [offset for offset, _ in self.layers[0].marks],
            "shared": {name: owner for name, owner in names.items() if name != owner},
            "kept": {name: n for name, n in iterate_leaves(self._tree()) if isinstance(n, int) and ".kept." in name},
        }
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
        os.close(handle)
        try:
            save_file(tensors, temporary, metadata={"format": FORMAT, "cache": json.dumps(meta)})
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, directory / CACHE_FILE)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike, config=None, device="cpu", kept_device: str | torch.device | None = None
    ) -> "TitansCache":
        """Reads a cache that `save_pretrained` wrote.

        Args:
            path: the directory, or the file itself.
            config: a `TitansConfig` that the cache must fit; a model checks this again when it is given the cache.
            device: where to put the tensors.
            kept_device: as for the constructor; from the next call on.

        Raises:
            ValueError: naming what is wrong: no such file, not a Titans cache, damaged, or of another model.
        """
        file = Path(path) / CACHE_FILE if Path(path).is_dir() else Path(path)
        tensors, meta = _read_file(file, device)
        cache = cls.__new__(cls)
        try:
            geometry = meta["geometry"]
            cache._setup({name: geometry[name] for name in VARIANT_GEOMETRY[geometry["variant"]]}, kept_device)
            if config is not None:
                cache.check(config)
            cache._load_tree(tensors, meta)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is incomplete as a Titans memory: {error!r}") from error
        return cache

    def _tree(self) -> tuple:
        return tuple(layer.tree() for layer in self.layers), self.progress, self.base_progress, self.recorded

    def _load_tree(self, tensors: dict[str, torch.Tensor], meta: dict) -> None:
        shared = {name: tensors[owner] for name, owner in meta["shared"].items()}
        tree = _nest(tensors | shared | meta["kept"])
        self.progress = Progress(**tree["1"])
        self.base_progress = Progress(**tree["2"]) if "2" in tree else None
        self.recorded = Columns(**tree["3"]) if "3" in tree else None
        for index, layer in enumerate(self.layers):
            parts = tree.get("0", {}).get(str(index), {})
            marks = parts.get("2", {})
            layer.state, layer.inputs = self._state(parts.get("0")), parts.get("1")
            layer.marks = [(offset, self._state(marks.get(str(i)))) for i, offset in enumerate(meta["marks"])]
            layer.columns, layer.record_past = meta["columns"], meta["recording"]
            layer.is_initialized = layer.state is not None or layer.inputs is not None
            present = (layer.state is None, layer.inputs is None)
            if present != (self.layers[0].state is None, self.layers[0].inputs is None):
                raise ValueError(f"the memory file is incomplete: layer {index} lacks what layer 0 has")
            states = (layer.state, *(state for _, state in layer.marks))
            firsts = (self.layers[0].state, *(state for _, state in self.layers[0].marks))
            for state, first in zip(states, firsts, strict=True):
                if state is not None and not _equal(counts_of(state), counts_of(first)):
                    raise ValueError(
                        f"the memory file is damaged: layer {index} must count tokens as layer 0 does, "
                        f"{counts_of(first)}, got {counts_of(state)}"
                    )

    def _state(self, tensors: dict | None) -> TitansLayerState | None:
        return None if tensors is None else state_from_tensors(tensors, self.geometry, self.batch_size)

    def _map_rows(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        rows = (self.progress, self.base_progress, self.recorded)
        self.progress, self.base_progress, self.recorded = map_tensors(fn, rows)


def _nbytes(tensors) -> int:
    """Bytes of tensors, of which some may be one and the same."""
    return sum({_place(t): t.numel() * t.element_size() for t in tensors}.values())


def _place(t: torch.Tensor) -> tuple:
    """What two tensors have alike that are one and the same."""
    return t.device, t.data_ptr(), t.shape, t.dtype


def _equal(one: list, other: list) -> bool:
    return all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True))


def _owned(t: torch.Tensor) -> torch.Tensor:
    """``t``, copied if it is a view that would keep a larger tensor alive, or one that others look into."""
    # Kept weights of which mixtures are read lie head by head.
    dense = t.is_contiguous() or (t.dim() == 5 and t.transpose(1, 2).is_contiguous())
    # Of a storage's methods, torch.compile knows size() alone.
    owned = dense and t.untyped_storage().size() == t.numel() * t.element_size()
    return t if owned else t.clone(memory_format=torch.contiguous_format)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_file(file: Path, device) -> tuple[dict[str, torch.Tensor], dict]:
    if not file.is_file():
        raise ValueError(f"no memory file at {file}; TitansCache.save_pretrained writes {CACHE_FILE}")
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{file} is not a Titans memory file: its format is {metadata.get('format')!r}, not {FORMAT!r}"
                )
            # Copied: inside the file's map a tensor may lie at any address, which changes how its products round.
            tensors = {name: handle.get_tensor(name).clone().to(device) for name in handle.keys()}
            return tensors, json.loads(metadata["cache"])
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{file} is damaged and cannot be read as a Titans memory: {error}") from error


def _nest(tensors: dict[str, torch.Tensor | int]) -> dict:
    tree: dict = {}
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = tensor
    return tree
