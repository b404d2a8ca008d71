"""Hugging Face's Trainer and accelerate themselves, with models that have random weights."""

import os

import pytest
import torch
from refusals import refuses
from torch.nn.functional import cross_entropy

from decaylab.errors import Lacks, WrongType

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

from oracle.plain_kfac import KFAC  # noqa: E402

from decaylab import KFACOptions, parameter_groups, watch  # noqa: E402
from decaylab.integrations.transformers import WatchCallback, labelled_rows  # noqa: E402
from decaylab.optim.first_order import sgd  # noqa: E402
from decaylab.probes.registry import free_probes  # noqa: E402

VOCABULARY, LENGTH = 11, 6
# SGD for what is outside the blocks: Adam's first steps blow rounding errors up.
EXACT = {"outputs": "exact", "refresh_every": 2, "invert_every": 2, "others": "sgd"}


def language_model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).double()


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return transformers.BertForSequenceClassification(config).double()


def texts(count=12, classes=None):
    """Token sequences, the later ones padded; labels of the padding are -100, or one per text."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        mask = torch.arange(LENGTH) < LENGTH - i % 3
        labels = torch.where(mask, tokens, -100) if classes is None else torch.tensor(i % classes)
        found.append({"input_ids": tokens, "attention_mask": mask.long(), "labels": labels})
    return found


def batch_of(examples):
    return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def trainer_of(model, optimizer, folder, callbacks=(), data=None, **options):
    defaults = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "save_strategy": "no"}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        **(defaults | options),
    )
    return transformers.Trainer(
        model,
        args,
        train_dataset=texts() if data is None else data,
        optimizers=(optimizer, None),
        callbacks=list(callbacks),
    )


def kfac(model, **more):
    options = KFACOptions(counted_rows=labelled_rows(model), seed=0)  # Trainer seeds torch
    return KFAC(model, 0.02, curvature="gauss-newton", options=options, **EXACT, **more)


def plain_loop(model, optimizer, data=None, epochs=2):
    data = texts() if data is None else data
    for _ in range(epochs):
        for first in range(0, len(data), 4):
            model(**batch_of(data[first : first + 4])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def assert_same_weights(model, other):
    """As far as Hugging Face's losses go, which are computed in single precision."""
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


# -- what K-FAC sees --


def test_rows_that_the_loss_leaves_out_do_not_count():
    """Factors of padded texts are those of a loop that hands over only the rows with a label."""
    batch = batch_of(texts(5))
    model, plain = language_model(), language_model()
    opt = kfac(model)
    model.train()
    model(**batch).loss.backward()
    opt.step()

    options = KFACOptions(seed=0)
    expected = KFAC(
        plain, 0.02, curvature="gauss-newton", logits="observed", options=options, **EXACT
    )
    plain.train()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    logits = plain(**inputs).logits
    labels = torch.cat([batch["labels"][:, 1:], torch.full((5, 1), -100)], 1)
    expected.observe(logits, mask=labels != -100)
    cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    expected.step()
    assert len(opt.factors()) == 9  # seven Linear layers, the embedding and the head
    for name, factors in expected.factors().items():
        torch.testing.assert_close(opt.factors()[name].A, factors.A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(opt.factors()[name].S, factors.S, rtol=1e-10, atol=1e-12)
    assert_same_weights(model, plain)


def test_which_rows_have_labels():
    logits = torch.zeros(2, 3, VOCABULARY)
    labels = torch.tensor([[1, 2, -100], [-100, 2, 3]])
    causal, classes = labelled_rows(language_model()), labelled_rows(classifier())
    assert causal({"labels": labels}, logits).tolist() == [[1, 0, 0], [1, 1, 0]]
    assert classes({"labels": labels}, logits).tolist() == [[1, 1, 0], [0, 1, 1]]
    assert classes({"labels": torch.tensor([0, -100])}, logits[:, 0]).tolist() == [1, 0]
    assert causal({}, logits) is None
    assert classes({"labels": torch.zeros(2)}, logits) is None


def test_probes_that_run_the_model_take_its_logits():
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = batch_of(texts(4))
    probes = ["gn_norm", "fr_norm", "kfac_gn_norm", "gn_trace", "effective_lr"]
    with watch(model, optimizer, every=1, probes=probes, inputs=batch["input_ids"]) as watched:
        model(**batch).loss.backward()
        optimizer.step()
    names = set(watched.records.names())
    assert {"gn_norm", "fr_norm", "kfac_gn_norm/lm_head", "gn_trace_train/lm_head"} <= names
    assert watched.records.last("gn_norm") > 0


# -- Trainer --


@pytest.mark.parametrize(("make", "classes"), [(language_model, None), (classifier, 3)])
def test_trainer_steps_are_those_of_a_plain_loop(make, classes, tmp_path):
    data = texts(classes=classes)
    model, plain = make(), make()
    optimizer = kfac(model)
    trainer_of(model, optimizer, tmp_path, data=data).train()
    plain.train()
    plain_loop(plain, kfac(plain), data)
    assert optimizer.steps == 6
    moved = [(a - b).norm() for a, b in zip(model.parameters(), make().parameters(), strict=True)]
    assert max(moved) > 1e-2
    assert_same_weights(model, plain)


def test_accumulated_gradients_are_those_of_a_plain_loop(tmp_path):
    """Trainer divides by the number of labels in all of its batches, K-FAC by that of rows."""
    model, plain = language_model(), language_model()
    trainer_of(
        model,
        kfac(model),
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    ).train()
    plain.train()
    optimizer, data = kfac(plain), texts()
    for _ in range(2):
        for first in range(0, len(data), 4):
            halves = [batch_of(data[i : i + 2]) for i in (first, first + 2)]
            labels = sum((half["labels"][:, 1:] != -100).sum() for half in halves)
            for half in halves:
                plain(**half, num_items_in_batch=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.steps == 6
    assert_same_weights(model, plain)


def test_the_callback_records_what_watch_records(tmp_path):
    def make(model):
        groups = parameter_groups(model, weight_decay=0.1, decay="decoupled")
        return sgd(groups, lr=0.05)

    model, plain = language_model(), language_model()
    callback = WatchCallback(probes=dict.fromkeys(free_probes(), 2))
    trainer_of(model, make(model), tmp_path, [callback]).train()
    optimizer = make(plain)
    plain.train()
    with watch(plain, optimizer, every=2, steps_per_epoch=3) as watched:
        plain_loop(plain, optimizer)
    found, expected = callback.watched.records, watched.records
    assert found.names() == expected.names()
    layer = "model.layers.0.mlp.up_proj"
    for name in (f"weight_norm/{layer}", f"rotation/{layer}", f"decay_exposure/{layer}"):
        assert [row.step for row in found.series(name)] == [1, 2, 4, 6]
        assert [row.epoch for row in found.series(name)] == [0, 0, 1, 1]
        values = [row.value for row in expected.series(name)]
        assert [row.value for row in found.series(name)] == pytest.approx(values)
    assert not callback.watched.optimizer._optimizer_step_post_hooks


def test_given_inputs_the_callback_measures_how_sizes_count_as_watch_does(tmp_path):
    model = classifier()
    batch = batch_of(texts(classes=3))
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    callback = WatchCallback(every=1, inputs=inputs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer_of(model, optimizer, tmp_path, [callback], texts(classes=3)).train()
    assert callback.watched.records.series("size_response/classifier")


def test_kfac_and_callback_together(tmp_path):
    model = language_model()
    callback = WatchCallback(
        every=3,
        probes="diagnosis",  # for tokens, the Gauss-Newton norm
        inputs=batch_of(texts(4))["input_ids"],
        folder=tmp_path / "watch",
    )
    trainer_of(model, kfac(model), tmp_path, [callback]).train()
    records = callback.watched.records
    assert [row.step for row in records.series("second_order_share/lm_head")] == [1, 3, 6]
    assert [row.step for row in records.series("gn_norm")] == [1, 3, 6]
    assert (tmp_path / "watch" / "rows.jsonl").stat().st_size


def test_a_resumed_training_is_the_uninterrupted_one_and_counts_on(tmp_path):
    model = language_model()
    trainer_of(model, kfac(model), tmp_path, save_strategy="steps", save_steps=3).train()
    again = language_model()
    callback = WatchCallback(every=2)
    trainer_of(again, kfac(again), tmp_path, [callback]).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [row.step for row in callback.watched.records.series("weight_norm")] == [4, 6]


def test_wrong_use_is_one_sentence(tmp_path):
    with refuses(Lacks, what="records yet"):
        _ = WatchCallback().watched
    model = language_model()
    with refuses(WrongType, name="inputs"):
        trainer_of(model, kfac(model), tmp_path, [WatchCallback(inputs=3)]).train()


def test_losses_are_outcomes_and_inputs_a_whole_batch(tmp_path):
    model, batch = language_model(), batch_of(texts(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    callback = WatchCallback(every=2, inputs=batch, probes="diagnosis")
    trainer = trainer_of(model, optimizer, tmp_path, [callback])
    trainer.args.logging_steps, trainer.args.logging_strategy = 1, "steps"
    trainer.train()
    recording = callback.watched.recording
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    assert losses
    assert dict(recording.outcomes["loss"]) == pytest.approx(losses)
    assert recording.rows.last("gn_norm") > 0
    assert "size_response/lm_head" in recording.rows.names()


# -- accelerate --


def test_accelerate_prepared_model_and_optimizer():
    model, plain = language_model(), language_model()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = kfac(model)
    data = texts()
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    prepared, wrapped, loader = accelerator.prepare(model, optimizer, loader)
    prepared.train()
    with watch(prepared, wrapped, every=1, probes=["weight_norm"]) as watched:
        for _ in range(2):
            for batch in loader:
                accelerator.backward(prepared(**batch).loss)
                wrapped.step()
                wrapped.zero_grad()
    plain.train()
    plain_loop(plain, kfac(plain), data)
    assert_same_weights(model, plain)
    assert len(watched.records.series("weight_norm")) == 6
