"""Batches against a loop over single images, and what an epoch must hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from decaylab.data import Batches, DataSet, Split, evaluation_batches
from decaylab.errors import Lacks, Mismatch, OutOfRange

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def make_split(count=23, size=8, channels=3):
    generator = torch.Generator().manual_seed(7)
    shape = (count, channels, size, size)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return Split(images, torch.arange(count))  # a label tells which image it is


def make(split, batch_size=5, **options):
    options = {"mean": MEAN, "std": STD, "dtype": torch.float64} | options
    return Batches(split, batch_size=batch_size, **options)


def naive(image, mean=MEAN, std=STD):
    image = image.double() / 255
    return torch.stack([(image[c] - mean[c]) / std[c] for c in range(len(image))])


def naive_crops(image, padding=4):
    """All 9 x 9 x 2 crops and flips of one raw image, pixel by pixel."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=torch.uint8)
    for y in range(height):
        for x in range(width):
            padded[:, y + padding, x + padding] = image[:, y, x]
    crops = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            crops[top, left, False] = crop
            crops[top, left, True] = torch.stack(
                [crop[:, :, width - 1 - x] for x in range(width)], 2
            )
    return crops


def epoch_of(batches):
    batches.begin_epoch()
    pairs = [batches.batch(i) for i in range(batches.steps_per_epoch)]
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 40),
    augment=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_image_once_up_to_the_remainder(count, batch_size, augment, seed):
    split = make_split(count)
    if batch_size > count:
        with refuses(OutOfRange, name="batch_size", value=batch_size):
            make(split, batch_size)
        return
    batches = make(split, batch_size, augment=augment, seed=seed)
    assert batches.steps_per_epoch == count // batch_size
    for _ in range(2):
        images, labels = epoch_of(batches)
        assert len(images) == len(labels) == count - count % batch_size
        assert len(labels.unique()) == len(labels)


def test_without_augmentation_each_image_is_only_normalised():
    split = make_split()
    images, labels = epoch_of(make(split))
    for image, label in zip(images, labels, strict=True):
        assert torch.allclose(image, naive(split.images[label]), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", [8, 13])
def test_crop_and_flip_equal_a_loop_over_images(size):
    split = make_split(count=12, size=size)
    batches = make(split, batch_size=4, augment=True)
    seen = set()
    for _ in range(3):
        images, labels = epoch_of(batches)
        for image, label in zip(images, labels, strict=True):
            crops = naive_crops(split.images[label]).items()
            same = [key for key, crop in crops if (image - naive(crop)).abs().max() < 1e-12]
            assert len(same) == 1
            seen.update(same)
    assert len(seen) > 20  # of 36 draws out of 162


def test_crops_and_flips_are_uniform():
    # One image many times over; its pixels all differ, so that a crop gives its corner away.
    image = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8)
    split = Split(image.expand(16200, 1, 8, 8), torch.zeros(16200, dtype=torch.int64))
    images, _ = epoch_of(make(split, 16200, mean=(0.0,), std=(1 / 255,), augment=True))
    crops = torch.stack(list(naive_crops(image[0]).values())).double().flatten(1)
    counts = (torch.cdist(images.flatten(1), crops) < 1e-6).sum(0)
    assert counts.sum() == 16200
    chi_squared = ((counts - 100.0) ** 2 / 100).sum()
    assert abs(chi_squared - 161) < 4 * (2 * 161) ** 0.5


def test_epochs_differ_and_a_seed_repeats():
    split = make_split()
    one, same, other = (make(split, augment=True, seed=seed) for seed in (1, 1, 2))
    first, second = epoch_of(one), epoch_of(one)
    assert torch.equal(epoch_of(same)[0], first[0])
    assert not torch.equal(first[1], second[1])
    assert not torch.equal(first[1], epoch_of(other)[1])


@pytest.mark.parametrize("augment", [False, True])
def test_state_gives_the_same_epoch_again(augment):
    split = make_split()
    batches = make(split, augment=augment)
    unused = batches.state_dict()
    first = epoch_of(batches)
    second = epoch_of(batches)
    state = batches.state_dict()  # in the midst of the second epoch
    third = epoch_of(batches)
    resumed = make(split, augment=augment, seed=99)
    resumed.load_state_dict(state)
    for expected in (second, third):
        for ours, theirs in zip(epoch_of(resumed), expected, strict=True):
            assert torch.equal(ours, theirs)
    resumed.load_state_dict(unused)
    assert torch.equal(resumed.state_dict()["generator"], unused["generator"])
    assert torch.equal(epoch_of(resumed)[0], first[0])


def test_batch_is_pure_and_needs_an_epoch():
    batches = make(make_split(), augment=True)
    with refuses(Lacks, what="order of the images"):
        batches.batch(0)
    batches.begin_epoch()
    assert torch.equal(batches.batch(2)[0], batches.batch(2)[0])
    for outside in (-1, batches.steps_per_epoch):
        with pytest.raises(IndexError):
            batches.batch(outside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_contiguity(dtype):
    split = make_split()
    for augment in (False, True):
        batches = make(split, augment=augment, dtype=dtype)
        batches.begin_epoch()
        images, labels = batches.batch(0)
        assert images.dtype == dtype
        assert labels.dtype == torch.int64
        assert images.is_contiguous()


def test_the_global_generator_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    epoch_of(make(make_split(), augment=True))
    assert torch.equal(torch.rand(4), expected)


def test_evaluation_batches_are_all_images_in_order():
    split = make_split(count=11)
    options = {"mean": MEAN, "std": STD, "dtype": torch.float64}
    pairs = list(evaluation_batches(split, batch_size=4, **options))
    assert [len(labels) for _, labels in pairs] == [4, 4, 3]
    assert torch.equal(torch.cat([labels for _, labels in pairs]), split.labels)
    expected = torch.stack([naive(image) for image in split.images])
    assert torch.allclose(torch.cat([x for x, _ in pairs]), expected, rtol=1e-13, atol=1e-13)
    with refuses(OutOfRange, name="batch_size", value=0):
        next(evaluation_batches(split, batch_size=0, **options))


def test_mean_and_std_of_the_wrong_length():
    with refuses(Mismatch, what="number of channels"):
        make(make_split(), mean=(0.5,))


def make_data(count=50):
    split = make_split(count)
    return DataSet("some", split, make_split(7), 10, MEAN, STD)


def test_held_out_splits_the_training_images():
    data = make_data()
    part = data.held_out()
    assert (len(part.train), len(part.test)) == (45, 5)
    together = torch.cat([part.train.labels, part.test.labels])
    assert torch.equal(together.sort().values, data.train.labels)
    for split in (part.train, part.test):
        assert torch.equal(split.images, data.train.images[split.labels])
    assert (part.name, part.classes, part.mean, part.std) == ("some", 10, MEAN, STD)


def test_held_out_is_the_same_each_time_whatever_is_random_elsewhere():
    data = make_data()
    chosen = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        chosen.append(data.held_out().test.labels)
    assert torch.equal(*chosen)


@pytest.mark.gpu
def test_on_the_gpu_nothing_waits_for_it():
    data = make_data().to("cuda")
    batches = Batches(data.train, batch_size=8, mean=MEAN, std=STD, augment=True)
    batches.begin_epoch()
    torch.cuda.set_sync_debug_mode("error")
    try:
        images, labels = batches.batch(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert images.device.type == labels.device.type == "cuda"
    crops = naive_crops(data.train.images[labels[0]].cpu()).values()
    near = [(images[0].cpu() - naive(crop)).abs().max() < 1e-5 for crop in crops]
    assert sum(near) == 1
    held = make_data().held_out().test.labels
    assert torch.equal(data.held_out().test.labels.cpu(), held)
    state = batches.state_dict()
    batches.load_state_dict(state)
    batches.begin_epoch()
    assert torch.equal(batches.batch(1)[0], images)
