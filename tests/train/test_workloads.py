"""Workloads: sizes as stated, batches determined by the seed alone, a reproducible corpus."""

import itertools
import sys

import pytest
import torch
from sklearn.datasets import load_digits

from amp_core.schema import RunError
from amp_core.settings.training import WORKLOADS, TrainConfig
from amp_core.train import train
from amp_core.train.workloads import ShuffledBatches, build, digits
from amp_core.train.workloads.text import load_corpus
from amp_core.train.workloads.text_bert import MASK, masked_batch, predicted_count
from tests.train.counting import counted

ALL_SIZES = [(w.name, s) for w in WORKLOADS.values() for s in w.sizes]


@pytest.mark.parametrize(("workload", "size"), ALL_SIZES)
def test_stated_parameters_and_activations_are_those_of_the_model(workload, size):
    stated = WORKLOADS[workload].sizes[size]
    parameters, activations = counted(workload, size)
    assert parameters == stated.parameters
    assert activations == pytest.approx(stated.activations, rel=0.1)


@pytest.mark.parametrize("workload", ["digits-cnn", "image-resnet"])
def test_workloads_on_images_need_scikit_learn_and_say_so(workload, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(RunError, match=f"workload='{workload}' uses scikit-learn's images; install"):
        build(TrainConfig(workload=workload).resolved())


def test_the_digits_are_those_of_scikit_learn_wherever_it_has_them(monkeypatch):
    expected = load_digits()
    for file in (digits.FILE, "moved elsewhere"):
        monkeypatch.setattr(digits, "FILE", file)
        images, labels = digits.digits()
        assert images.tobytes() == expected.images.tobytes() and labels.tobytes() == expected.target.tobytes()
        assert (images.shape, labels.dtype) == (expected.images.shape, expected.target.dtype)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_seed_alone_determines_weights_and_batches(workload):
    def drawn(**settings):
        built = build(TrainConfig(workload=workload, **settings).resolved())
        torch.rand(3)  # training draws random numbers too; the order of the data must not depend on them
        batches = list(itertools.islice(iter(built.batches), 3))
        return [*built.model.state_dict().values(), *itertools.chain(*batches)]

    first = drawn(seed=1, precision="fp32")
    assert all(map(torch.equal, first, drawn(seed=1, precision="fp16", steps=3)))
    assert not all(map(torch.equal, first, drawn(seed=2, precision="fp32")))


def test_the_batch_size_does_not_change_the_order_of_samples():
    def samples(batch_size, count):
        stream = iter(ShuffledBatches(10, batch_size, seed=3, collate=lambda chosen: (chosen,)))
        return torch.cat([next(stream)[0] for _ in range(count)])

    assert torch.equal(samples(4, 6), samples(8, 3))
    assert sorted(samples(5, 2).tolist()) == list(range(10))  # every sample once before any is repeated


def test_held_out_samples_are_not_in_the_training_data():
    built = build(TrainConfig(workload="digits-cnn", batch_size=1438).resolved())
    assert sum(built.samples(batch) for batch in built.held_out) + 1438 == 1797
    training_images = {tuple(image.flatten().tolist()) for image in next(iter(built.batches))[0]}
    held_out = [tuple(image.flatten().tolist()) for images, _ in built.held_out for image in images]
    assert len(training_images) == 1438
    assert not training_images.intersection(held_out)


def test_the_corpus_is_reproducible_and_its_hash_depends_on_the_text(tmp_path):
    for number in range(12):
        (tmp_path / f"m{number:02d}.py").write_text(f"value = {number}\n" * 5)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "m.py").write_text("left out")
    first, again = load_corpus(10_000, tmp_path), load_corpus(10_000, tmp_path)
    assert first.sha256 == again.sha256
    assert torch.equal(first.train, again.train)
    assert bytes(first.held_out.tolist()) == b"value = 9\n" * 5  # the whole tenth file
    assert b"left out" not in bytes(first.train.tolist())
    (tmp_path / "m00.py").write_text("value = 99\n")
    assert load_corpus(10_000, tmp_path).sha256 != first.sha256


def test_the_corpus_respects_its_limit():
    corpus = load_corpus(200_000)
    assert len(corpus.train) + len(corpus.held_out) == 200_000


def test_a_corpus_without_sources_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"standard library's \*.py files"):
        load_corpus(1000, tmp_path)


def test_gpt_does_not_depend_on_later_bytes():
    model = build(TrainConfig(workload="text-gpt").resolved()).model.eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_bert_predicts_bytes_that_are_masked_in_its_input():
    text = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    tokens, predicted, answers = masked_batch(text, torch.tensor([0, 640, 64]), context=64, seed=3)
    shown = torch.stack([text[:64], text[640:704], text[64:128]]).long()
    assert torch.equal(answers, shown.gather(1, predicted)) and predicted.shape == (3, predicted_count(64)) == (3, 10)
    assert all(len(set(row)) == 10 for row in predicted.tolist())
    assert ((tokens == MASK).sum(1) == 8).all()
    untouched = torch.ones_like(tokens, dtype=torch.bool).scatter(1, predicted[:, :9], False)
    assert torch.equal(tokens[untouched], shown[untouched])
    again = masked_batch(text, torch.tensor([640]), context=64, seed=3)  # in whichever batch a window is
    assert torch.equal(again[0][0], tokens[1]) and torch.equal(again[1][0], predicted[1])
    assert not torch.equal(masked_batch(text, torch.tensor([640]), context=64, seed=4)[1], again[1])


def test_bert_depends_on_earlier_and_later_bytes():
    workload = build(TrainConfig(workload="text-bert").resolved())
    tokens = torch.randint(0, 256, (1, 16))
    predicted = torch.tensor([[8]])
    for place in (0, 15):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % 256
        assert not torch.allclose(workload.model(tokens, predicted), workload.model(changed, predicted))


@pytest.mark.parametrize("workload", ["text-bert", "image-resnet"])
def test_tiny_workloads_learn(workload, tmp_path):
    config = TrainConfig(workload=workload, precision="fp32", device="cpu", steps=120, every=120)
    summary = train(config, tmp_path / "r")
    # Accuracy of always predicting a blank: 0.26; of always one digit: 0.1.
    guess = {"text-bert": 0.3, "image-resnet": 0.5}[workload]
    assert summary.loss_last < 0.6 * summary.loss_first
    assert summary.results["eval_accuracy"] > guess


def test_memory_is_the_sum_of_weights_adam_states_and_activations():
    size = WORKLOADS["text-gpt"].sizes["small"]
    assert size.memory_bytes(1) == 16 * size.parameters + 4 * size.activations
    assert size.memory_bytes() > size.memory_bytes(1) > size.state_bytes


def test_an_lstm_under_fp16_autocast_returns_fp16_and_leaves_onednn_unchanged():
    model = build(TrainConfig(workload="text-lstm").resolved()).model
    tokens = torch.randint(0, 256, (2, 8))
    reference = model(tokens)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens)
    assert logits.dtype == torch.float16
    torch.testing.assert_close(logits.float(), reference, atol=2e-2, rtol=2e-2)
    assert torch.backends.mkldnn.enabled


OWN = """
import torch
from torch import nn
from amp_core.train import Workload

def triple():
    data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]
    return nn.Linear(4, 2), data, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])

def whole():
    model, data, loss_fn = triple()
    return Workload(model, data, loss_fn, held_out=data[:1])

def workers():
    class Loader(torch.utils.data.DataLoader):
        def __iter__(self):
            raise RuntimeError("workers were started")

    return nn.Linear(4, 2), Loader([1, 2], num_workers=2), print

def pair(): return 1, 2
def no_model(): return "model", [1], print
def one_pass(): return nn.Linear(4, 2), iter([1]), print
def no_loss(): return nn.Linear(4, 2), [1], 3
def breaks():
    raise KeyError("x")
not_a_function = 3
"""


@pytest.fixture
def own_file(tmp_path):
    file = tmp_path / "own_workload_under_test.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("function", ["triple", "whole"])
def test_a_user_workload_is_seeded_and_checked(own_file, function):
    first, again, other = (build(TrainConfig(workload=f"{own_file}:{function}", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first.model.weight, again.model.weight)
    assert not torch.equal(first.model.weight, other.model.weight)
    assert first.samples(next(iter(first.batches))) == 8
    assert first.loss_fn(first.model, next(iter(first.batches))).ndim == 0


def test_checking_a_user_workload_does_not_consume_its_batches(own_file):
    assert len(build(TrainConfig(workload=f"{own_file}:workers")).batches) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", "has no function missing"),
        ("not_a_function", "has no function not_a_function"),
        ("pair", "returned a tuple of 2; return (model, batches, loss_fn)"),
        ("no_model", "returned a value of type str as model"),
        ("one_pass", "give a list or a DataLoader, which can be iterated more than once"),
        ("no_loss", "returned a value of type int as loss_fn"),
        ("breaks", "failed at line 26: KeyError: 'x'"),
    ],
)
def test_an_invalid_user_workload_is_refused(own_file, function, message):
    with pytest.raises(RunError) as error:
        build(TrainConfig(workload=f"{own_file}:{function}"))
    assert message in str(error.value)


def test_a_user_workload_without_its_file_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"none\.py does not exist; give the path of an existing Python file"):
        build(TrainConfig(workload=f"{tmp_path}/none.py:f"))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("model(batch)[:1]", r"returned a loss of shape \(1, 2\); return one number"),
        ("0.5", "returned a loss of type float; return a tensor"),
    ],
)
def test_a_loss_that_is_not_a_single_number_is_refused(tmp_path, loss, message):
    file = tmp_path / "shapes.py"
    file.write_text(
        f"import torch\ndef f():\n    return torch.nn.Linear(3, 2), [torch.ones(4, 3)], lambda model, batch: {loss}\n"
    )
    config = TrainConfig(workload=f"{file}:f", precision="fp32", device="cpu", steps=1)
    with pytest.raises(RunError, match=message):
        train(config, tmp_path / "run")


def test_a_loss_of_a_single_number_may_have_a_dimension(tmp_path):
    file = tmp_path / "vector.py"
    file.write_text(
        "import torch\n"
        "def f():\n"
        "    return torch.nn.Linear(3, 1), [torch.ones(1, 3)], lambda model, batch: model(batch)[0]\n"
    )
    config = TrainConfig(workload=f"{file}:f", precision="fp32", device="cpu", steps=2)
    assert train(config, tmp_path / "run").steps == 2
