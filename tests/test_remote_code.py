# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint carries its code: it loads where the package is not installed, and beside the installed one."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments

import transformers_titans
from titans_testing import fill_with_noise, logits_of, random_ids, tiny_model
from transformers_titans import (
    TitansCache,
    TitansForCausalLM,
    TitansForSequenceClassification,
    TitansForTokenClassification,
)
from transformers_titans.memory_layer import ALPHA_START
from variant_oracle import VARIANTS, variant_model


# Each architecture, and one that keeps memories.
SAVED = [*VARIANTS, "mac_ssc"]
PACKAGE = Path(transformers_titans.__file__).parent
# What belongs to an installation and not to a model.
NOT_CARRIED = {"__init__.py", "auto_registration.py"}
CARRIED = {path.name for path in PACKAGE.glob("*.py")} - NOT_CARRIED
AUTO_MAP = {
    "AutoConfig": "configuration_titans.TitansConfig",
    "AutoModel": "modeling_titans.TitansModel",
    "AutoModelForCausalLM": "modeling_titans.TitansForCausalLM",
    "AutoModelForSequenceClassification": "modeling_titans.TitansForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_titans.TitansForTokenClassification",
}

# Put before every script that must do without the package and without Triton.
BLOCKED = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers_titans", "triton"):
            raise ImportError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Block())
"""


# Each script runs in a copy of the process that has imported what they share, and knows nothing of the others.
COPIES = """
import os, sys, traceback

def run_in_a_copy(script):
    copy = os.fork()
    if not copy:
        try:
            exec(script, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(copy, 0)[1]:
        sys.exit(1)

"""


def run(*scripts: str, folder: Path, shared: str = "import torch", blocked: bool = False) -> None:
    """Runs scripts in fresh processes with an empty working directory and an empty cache of remote code.

    They are copies of one that has run ``shared``. Each must come to its end, where it prints "done".
    """
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    environment = os.environ | {
        "HF_HOME": str(folder / "hf_home"),
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # A thread pool does not survive a copy: none is started before.
    code = (BLOCKED if blocked else "") + COPIES + f"{shared}\n"
    for script in scripts:
        script = "import torch\ntorch.set_num_threads(1)\n" + textwrap.dedent(script)
        code += f"run_in_a_copy({script!r})\n"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.splitlines().count("done") == len(scripts)


def assert_complete(folder: Path) -> None:
    assert {path.name for path in folder.glob("*.py")} == CARRIED
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == AUTO_MAP
    configuration = folder / "configuration_titans.py"
    assert not configuration.is_symlink()
    assert configuration.read_text() == (PACKAGE / "configuration_titans.py").read_text()


def save_everything(folder: Path, variant: str) -> TitansForCausalLM:
    """Saves a model and what it computes, for another process to compare."""
    model = variant_model(variant)
    model.save_pretrained(folder / "model")
    ids = random_ids(2, 11)
    cache = TitansCache(model.config)
    logits = logits_of(model, ids, cache=cache)
    repetitive = torch.tensor([[5, 9, 14, 7, 33] * 5])
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    torch.save(
        {
            "ids": ids,
            "logits": logits,
            "later": logits_of(model, ids, cache=cache),
            "greedy": model.generate(ids, **arguments),
            "beams": model.generate(ids, num_beams=3, **arguments),
            "repetitive": repetitive,
            "assisted": model.generate(repetitive, **arguments),
        },
        folder / "expected.pt",
    )
    return model


def test_save_pretrained_carries_the_code(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert_complete(tmp_path)


@pytest.mark.parametrize("model_class", [TitansForSequenceClassification, TitansForTokenClassification])
def test_heads_carry_the_whole_auto_map(model_class, tmp_path):
    tiny_model(model_class).save_pretrained(tmp_path)
    assert_complete(tmp_path)


def test_trainer_checkpoint_carries_the_code(tmp_path):
    ids = random_ids(9)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(tiny_model(), arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 2).train()
    assert_complete(tmp_path / "checkpoint-1")


def everything_script(folder: Path) -> str:
    """Loads what `save_everything` has saved below the folder, and does with it what it has done."""
    return f"""
        import sys
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
        arguments = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)

        def check(root, path, ids, expected, config):
            model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
            assert type(model).__module__.startswith("transformers_modules")
            with torch.no_grad():
                first = model(ids, use_cache=True)
                assert torch.equal(first.logits, expected["logits"])
                first.cache.save_pretrained(root + "/memory")
                loaded = type(first.cache).from_pretrained(root + "/memory", config=config)
                assert torch.equal(model(ids, cache=loaded).logits, expected["later"])
            assert torch.equal(model.generate(ids, **arguments), expected["greedy"])
            assert torch.equal(model.generate(ids, num_beams=3, **arguments), expected["beams"])
            lookup = model.generate(expected["repetitive"], prompt_lookup_num_tokens=3, **arguments)
            assert torch.equal(lookup, expected["assisted"])
            loss = model.train()(ids, labels=ids).loss
            loss.backward()
            return model.eval()

        for variant in {SAVED}:
            root = {str(folder)!r} + "/" + variant
            expected = torch.load(root + "/expected.pt")
            config = AutoConfig.from_pretrained(root + "/model", trust_remote_code=True)
            assert type(config).__module__.startswith("transformers_modules")
            model = check(root, root + "/model", expected["ids"], expected, config)
            model.save_pretrained(root + "/again")
            check(root, root + "/again", expected["ids"], expected, config)
            base = AutoModel.from_pretrained(root + "/model", trust_remote_code=True)
            assert torch.equal(base.embed_tokens.weight, model.model.embed_tokens.weight)
        absent = ("transformers_titans", "triton", "flash_attn", "flash_attn_interface", "causal_conv1d", "fla")
        assert not any(name.split(".")[0] in absent for name in sys.modules)
        print("done")
    """


def test_checkpoints_load_without_the_package(tmp_path):
    for variant in SAVED:
        save_everything(tmp_path / variant, variant)
    scripts = everything_script(tmp_path), classifiers_script(tmp_path)
    run(*scripts, folder=tmp_path, shared="from transformers import GenerationMixin", blocked=True)
    for variant in SAVED:
        assert_complete(tmp_path / variant / "again")


# Put before the scripts that train a checkpoint with the code it carries.
TRAINING = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

def train(folder, variant, steps, resume=None, **fields):
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder + "/" + variant, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    ids = torch.randint(3, 64, (12, 19), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        output_dir=folder + "/" + variant + "-run", max_steps=steps, per_device_train_batch_size=2, learning_rate=1e-2,
        lr_scheduler_type="constant", logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, **fields
    )
    trainer = Trainer(model, arguments, train_dataset=[dict(input_ids=row, labels=row) for row in ids])
    trainer.train(resume_from_checkpoint=resume)
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

"""


def test_a_checkpoint_of_remote_code_is_resumed_in_a_new_process(tmp_path):
    resumed = ["mac", "lmm_grm"]
    for variant in resumed:
        variant_model(variant).save_pretrained(tmp_path / variant)
    first = f"""{TRAINING}
folder = {str(tmp_path)!r}
for variant in {resumed}:
    model, losses = train(folder, variant, 6, save_strategy="no")
    torch.save((model.state_dict(), losses), folder + "/" + variant + "-unbroken.pt")
    train(folder, variant, 3, save_steps=3)
print("done")
"""
    second = f"""{TRAINING}
folder = {str(tmp_path)!r}
for variant in {resumed}:
    expected, losses = torch.load(folder + "/" + variant + "-unbroken.pt")
    resume = folder + "/" + variant + "-run/checkpoint-3"
    model, continued = train(folder, variant, 6, resume=resume, save_strategy="no")
    assert len(losses) == 6 and continued == losses, (variant, losses, continued)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items()), variant
    # The checkpoint stands for itself, too.
    alone = AutoModelForCausalLM.from_pretrained(resume, trust_remote_code=True)
    for name in ("variant", "memory_caching"):
        assert getattr(alone.config, name) == getattr(model.config, name)
print("done")
"""
    shared = "import torch\nfrom transformers import GenerationMixin, Trainer"
    run(first, second, folder=tmp_path, shared=shared, blocked=True)
    for variant in resumed:
        checkpoint = tmp_path / f"{variant}-run" / "checkpoint-3"
        assert_complete(checkpoint)
        # A memory is no part of a model.
        assert [path.name for path in checkpoint.rglob("*.safetensors")] == ["model.safetensors"]


def classifiers_script(tmp_path: Path) -> str:
    """Saves classifiers and a checkpoint that lacks a parameter, and loads them."""
    ids = random_ids(2, 11)
    missing = "model.layers.0.memory.alpha_proj.bias"
    incomplete = variant_model("mac")
    tensors = incomplete.state_dict()
    tensors.pop(missing)
    incomplete.save_pretrained(tmp_path / "incomplete", state_dict=tensors)
    sequence = variant_model("mag", model_class=TitansForSequenceClassification, num_labels=3)
    token = variant_model("mal", model_class=TitansForTokenClassification, num_labels=3)
    sequence.save_pretrained(tmp_path / "sequence")
    token.save_pretrained(tmp_path / "token")
    expected = {"ids": ids, "sequence": logits_of(sequence, ids), "token": logits_of(token, ids)}
    torch.save(expected, tmp_path / "expected.pt")
    return f"""
        from safetensors.torch import load_file
        from transformers import (
            AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
        )
        root = {str(tmp_path)!r}
        state = AutoModelForCausalLM.from_pretrained(root + "/incomplete", trust_remote_code=True).state_dict()
        saved = load_file(root + "/incomplete/model.safetensors")
        assert state.keys() - saved.keys() == {{{missing!r}}}
        assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
        assert state[{missing!r}].tolist() == {[ALPHA_START] * 2}, state[{missing!r}]
        expected = torch.load(root + "/expected.pt")
        for kind, auto in (
            ("sequence", AutoModelForSequenceClassification), ("token", AutoModelForTokenClassification)
        ):
            model = auto.from_pretrained(root + "/" + kind, trust_remote_code=True)
            assert type(model).__module__.startswith("transformers_modules")
            with torch.no_grad():
                assert torch.equal(model(expected["ids"]).logits, expected[kind])
        print("done")
    """


def test_package_and_checkpoints_copy_work_in_one_process(tmp_path):
    save_everything(tmp_path, "mac")
    script = f"""
        from transformers import AutoModelForCausalLM
        root = {str(tmp_path)!r}
        expected = torch.load(root + "/expected.pt")
        ids, arguments = expected["ids"], dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
        import transformers_titans
        installed = transformers_titans.TitansForCausalLM.from_pretrained(root + "/model")
        from transformers.dynamic_module_utils import get_class_from_dynamic_module
        remote_class = get_class_from_dynamic_module("modeling_titans.TitansForCausalLM", root + "/model")
        assert remote_class is not transformers_titans.TitansForCausalLM
        remote = remote_class.from_pretrained(root + "/model")
        for model in (installed, remote, installed):
            assert torch.equal(model.generate(ids, **arguments), expected["greedy"])
            assert torch.equal(model.generate(ids, num_beams=3, **arguments), expected["beams"])
        # A memory made by one is understood by the other.
        with torch.no_grad():
            for reader, asked in ((installed, remote), (remote, installed)):
                cache = reader(ids, use_cache=True).cache
                assert torch.equal(asked(ids, cache=cache).logits, expected["later"])
        assert type(AutoModelForCausalLM.from_pretrained(root + "/model")) is transformers_titans.TitansForCausalLM
        print("done")
    """
    run(script, folder=tmp_path)


# The package before transformers and behind it, a module of it, and the op alone.
ORDERS = [
    "import transformers_titans; from transformers import AutoModelForCausalLM, AutoConfig",
    "from transformers import AutoModelForCausalLM, AutoConfig; import transformers_titans",
    "from transformers_titans.modeling_titans import TitansForCausalLM\n"
    "from transformers import AutoModelForCausalLM, AutoConfig",
    "from transformers_titans.memory_ops import neural_memory\n"
    "from transformers import AutoModelForCausalLM, AutoConfig",
]


def test_importing_the_package_registers_the_models_and_the_op_needs_none(tmp_path):
    scripts = [
        f"""
{textwrap.indent(first, "        ")}
        import importlib
        import transformers_titans
        for _ in range(2):
            config = AutoConfig.for_model("titans", hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
            assert type(config) is transformers_titans.TitansConfig
            assert type(AutoModelForCausalLM.from_config(config)) is transformers_titans.TitansForCausalLM
            importlib.reload(transformers_titans)
        print("done")
        """
        for first in ORDERS
    ]
    op_alone = """
        import sys
        import transformers_titans
        from transformers_titans.memory_ops import neural_memory
        from transformers_titans import MemoryState, TokenLayout
        assert "torch" in sys.modules and "transformers" not in sys.modules
        print("done")
    """
    foreign_model_of_the_same_type = """
        from transformers import AutoConfig, PreTrainedConfig
        class OtherTitansConfig(PreTrainedConfig):
            model_type = "titans"
        AutoConfig.register("titans", OtherTitansConfig)
        try:
            import transformers_titans
            from transformers_titans import TitansForCausalLM
        except ImportError as error:
            assert "model_type 'titans' is already registered" in str(error) and "OtherTitansConfig" in str(error)
            print("done")
    """
    run(*scripts, op_alone, foreign_model_of_the_same_type, folder=tmp_path)


def test_registering_again_is_harmless():
    from transformers_titans.auto_registration import register

    for _ in range(2):
        register("transformers_titans")


def test_noise_reaches_every_parameter():
    # What the comparisons above rest on.
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    fill_with_noise(model, seed=1)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.std() > 0.05 for p in model.parameters())
