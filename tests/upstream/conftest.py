# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""The markers of transformers' test suite, which strict pytest refuses unless they are known."""

MARKERS = (
    "accelerate_tests all_flash_attn_test bitsandbytes executorch_export_test flash_attn_3_test flash_attn_4_test"
    " flash_attn_test fsdp_ci generate is_agent_test is_expert_parallel_test is_fsdp_test is_pipeline_test"
    " is_staging_test is_tensor_parallel_test is_training_test not_device_test onnx_export_test order"
    " tensor_parallel_ci timeout torch_compile_test torch_export_test training_ci"
)


def pytest_configure(config):
    for name in MARKERS.split():
        config.addinivalue_line("markers", f"{name}: transformers' own")
