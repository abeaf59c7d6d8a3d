# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Registers the Titans models with transformers' Auto classes as soon as transformers is there, and not before.

Importing transformers from the package itself would cost seconds to whoever wants the op alone. So the package waits:
if transformers is loaded, it registers at once; if not, at the end of the import that loads it.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import types


_NEEDS_TRANSFORMERS = (
    "attention_titans",
    "cache_titans",
    "compiled_decoding",
    "configuration_titans",
    "decoder_layer",
    "generation_titans",
    "layer_plan",
    "memory_layer",
    "modeling_titans",
)


def register(package: str) -> None:
    """Makes AutoConfig, AutoModel and the others know Titans; harmless when repeated.

    Raises:
        ImportError: if another config class has taken the model type "titans".
    """
    from transformers.models.auto import configuration_auto, modeling_auto

    config_class = importlib.import_module(f"{package}.configuration_titans").TitansConfig
    models = importlib.import_module(f"{package}.modeling_titans")
    model_type = config_class.model_type
    mapping = configuration_auto.CONFIG_MAPPING
    taken = mapping[model_type] if model_type in mapping else config_class
    if taken.__module__ != config_class.__module__:
        raise ImportError(
            f"model_type {model_type!r} is already registered with transformers by {taken.__module__}."
            f"{taken.__qualname__}; {package} cannot be used beside it"
        )
    configuration_auto.AutoConfig.register(model_type, config_class, exist_ok=True)
    config_class.register_for_auto_class()
    for auto_class, model_class in (
        ("AutoModel", models.TitansModel),
        ("AutoModelForCausalLM", models.TitansForCausalLM),
        ("AutoModelForSequenceClassification", models.TitansForSequenceClassification),
        ("AutoModelForTokenClassification", models.TitansForTokenClassification),
    ):
        getattr(modeling_auto, auto_class).register(config_class, model_class, exist_ok=True)
        model_class.register_for_auto_class(auto_class)


def watch_imports(package: str) -> None:
    """Registers now or when transformers has been imported."""
    module = sys.modules[package]
    module.__class__ = _Package
    if "transformers" in sys.modules:
        module.register_when_possible()
    else:
        sys.meta_path.insert(0, _TransformersWatcher(package))


class _Package(types.ModuleType):
    """The package's module class: it is told of each submodule whose import is complete."""

    _done = False

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name in _NEEDS_TRANSFORMERS:
            self.register_when_possible()

    def register_when_possible(self) -> None:
        """Registers, once, unless a module needed for it is in the middle of its own import: then it comes back."""
        half_way = any(
            f"{self.__name__}.{name}" in sys.modules and name not in self.__dict__ for name in _NEEDS_TRANSFORMERS
        )
        if self._done or half_way:
            return
        self.__dict__["_done"] = True
        try:
            register(self.__name__)
        except BaseException:
            self.__dict__["_done"] = False
            raise


class _TransformersWatcher(importlib.abc.MetaPathFinder):
    """Lets the import of transformers pass and calls the package when it is over."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name != "transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotifyingLoader(spec.loader, self.package)
        return spec


class _NotifyingLoader(importlib.abc.Loader):
    def __init__(self, loader, package: str):
        self.loader, self.package = loader, package

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        sys.modules[self.package].register_when_possible()
