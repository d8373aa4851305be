"""The output head of a model, where a pipeline rank does not hold it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.model_structure import PlaceholderModule
from hyper_parallel.backends.torch.partial_use import extend_backward
from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.ir import Strategy

pytestmark = pytest.mark.torch


def bert_generation():
    """A model that reads its head from a module that wraps it."""
    config = AutoConfig.for_model(
        "bert-generation", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, is_decoder=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def test_a_head_inside_of_a_module_of_another_rank_is_none():
    model = bert_generation()
    assert head_of(model) is model.lm_head.decoder
    model.lm_head = PlaceholderModule(model.lm_head)
    assert head_of(model) is None


@pytest.mark.parametrize("frozen", [False, True])
def test_data_parallel_stages_without_the_head_extend_the_backward_of_a_frozen_decoder(frozen):
    model = bert_generation().requires_grad_(not frozen)
    model.lm_head = PlaceholderModule(model.lm_head)
    embedding = model.get_input_embeddings()
    with extend_backward(model, Strategy(pp=2, dp_shard=2)):
        assert embedding(torch.tensor([1])).requires_grad
    assert embedding(torch.tensor([1])).requires_grad is not frozen


def test_an_error_of_the_model_itself_is_not_hidden():
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    def broken():
        raise AttributeError("broken")

    model.get_output_embeddings = broken
    with pytest.raises(AttributeError, match="broken"):
        head_of(model)
