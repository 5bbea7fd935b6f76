"""A RoBERTa for the tests of this folder, as the hub has a published one."""

import pytest
import torch

WORDS = "Who wrote the Iliad? Homer was a poet. Was he born in Chios or Smyrna? yes no café"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder with a small RoBERTa, whose weights are random, and with its own vocabulary."""
    transformers = pytest.importorskip(
        "transformers", reason="makes the RoBERTa: the package transformers, .[all]"
    )
    tokenizers = pytest.importorskip("tokenizers")  # it comes with transformers
    folder = tmp_path_factory.mktemp("roberta")
    learned = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    learned.train_from_iterator([WORDS], 300, special_tokens=special)
    learned.save_model(str(folder))
    config = transformers.RobertaConfig(
        vocab_size=301,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=42,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = transformers.RobertaForMaskedLM(config)
    with torch.no_grad():
        for parameter in model.parameters():  # away from where they begin
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
