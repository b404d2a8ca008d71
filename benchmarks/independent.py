"""VGG16 and ResNet32 on CIFAR-10 by SGD or AdamW: a second opinion on Table 1's first-order cells.

    python benchmarks/independent.py --data FOLDER [--graph] [--precision bf16] [--json FILE]
                                     [--grid "aug=0,lr=0.1,wd=1e-3;aug=1,lr=0.1,wd=1e-3"]

Plain PyTorch, written from the recipe (docs/recipe.md) before looking at decaylab's code, of which
it uses nothing: another loop, augmentation, split and optimizer calls. After every epoch the test
accuracy; at the end also with BN's statistics averaged anew over the training images (does their
lag matter?), and the share of channels whose variance is below BN's eps (does eps bite?).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from independent_parts import initialise, load, resnet32, shuffled, split, vgg16
from torch import Tensor, nn
from torch.nn import functional as F


def optimizer_of(
    model: nn.Module, options: argparse.Namespace, device: torch.device
) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    if options.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=options.lr,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=options.wd,
            capturable=options.graph,
            foreach=device.type == "cuda",
        )
    inside = options.wd if options.decay == "coupled" else 0.0
    return torch.optim.SGD(
        parameters, lr=options.lr, momentum=0.9, weight_decay=inside, foreach=device.type == "cuda"
    )


def amp(options: argparse.Namespace, device: torch.device) -> torch.autocast:
    return torch.autocast(
        device.type, torch.bfloat16, enabled=options.precision == "bf16", cache_enabled=False
    )


class Trainer:
    """Model, optimizer and their step."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        self.options, self.device = options, device
        self.model = {"vgg16": vgg16, "resnet32": resnet32}[options.network](options)
        initialise(self.model, options.init)
        self.model.to(device, memory_format=torch.channels_last)
        self.optimizer = optimizer_of(self.model, options, device)
        self.loss_sum = torch.zeros((), device=device)
        self.hits = torch.zeros((), device=device)
        self.captured: torch.cuda.CUDAGraph | None = None
        self.x = torch.zeros(options.batch, 32, 32, 3, dtype=torch.uint8, device=device)
        self.y = torch.zeros(options.batch, dtype=torch.long, device=device)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Forward, backward, update; the loss and the hits are added up on the device."""
        options = self.options
        self.optimizer.zero_grad(set_to_none=False)  # a CUDA graph relies on where gradients lie
        with amp(options, self.device):
            logits = self.model(x)
        loss = F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y)
        loss.backward()
        if options.optimizer == "sgd" and options.decay == "decoupled":
            with torch.no_grad():  # W -= lr (velocity + wd W): outside the momentum
                lr = self.optimizer.param_groups[0]["lr"]
                torch._foreach_mul_(list(self.model.parameters()), 1 - lr * options.wd)
        self.optimizer.step()
        self.loss_sum += loss.detach() * len(x)
        self.hits += (logits.detach().argmax(1) == y).sum()

    def set_lr(self, lr: float) -> None:
        """Give the optimizer a learning rate; a captured step holds the old one and is dropped."""
        if self.optimizer.param_groups[0]["lr"] != lr:
            self.optimizer.param_groups[0]["lr"] = lr
            self.captured = None  # lr is a constant of the graph: captured anew, three times a run

    def full_step(self, x: Tensor, y: Tensor, warm: bool) -> None:
        """A step on a full batch, replayed from a graph once eager steps have warmed up."""
        if not (self.options.graph and warm):
            return self.step(x, y)
        self.x.copy_(x)
        self.y.copy_(y)
        if self.captured is None:
            self.captured = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.captured, stream=torch.cuda.current_stream()):
                self.step(self.x, self.y)  # runs nothing: the replay is this batch's one step
        self.captured.replay()

    def epoch(self, x: Tensor, y: Tensor, first: bool) -> tuple[float, float, int]:
        """Train on x, y in this order; mean loss, accuracy in percent, steps."""
        batch = self.options.batch
        self.model.train()
        self.loss_sum.zero_()
        self.hits.zero_()
        seen = 0
        for start in range(0, len(x), batch):
            bx, by = x[start : start + batch], y[start : start + batch]
            if len(bx) == batch:
                self.full_step(bx, by, warm=not first or start >= 20 * batch)
            elif self.options.drop_last:
                continue
            else:
                self.step(bx, by)
            seen += len(bx)
        return self.loss_sum.item() / seen, 100 * self.hits.item() / seen, math.ceil(seen / batch)

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Mean loss, and accuracy in percent, with BN's running statistics."""
        self.model.eval()
        loss = torch.zeros((), device=self.device)
        hits = torch.zeros((), device=self.device)
        for start in range(0, len(x), 1000):
            with amp(self.options, self.device):
                logits = self.model(x[start : start + 1000]).float()
            labels = y[start : start + 1000]
            loss += F.cross_entropy(logits, labels, reduction="sum")
            hits += (logits.argmax(1) == labels).sum()
        return loss.item() / len(x), 100 * hits.item() / len(x)

    @torch.no_grad()
    def reestimated(self, x: Tensor, test_x: Tensor, test_y: Tensor) -> tuple[float, float] | None:
        """Test loss and accuracy with BN's statistics averaged over a pass of x; then put back."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        if not norms:
            return None
        before = [({k: v.clone() for k, v in m.state_dict().items()}, m.momentum) for m in norms]
        for m in norms:
            m.reset_running_stats()
            m.momentum = None  # plain mean over the batches
        self.model.train()
        for start in range(0, len(x) - len(x) % 1000 or len(x), 1000):
            with amp(self.options, self.device):
                self.model(x[start : start + 1000])
        result = self.evaluate(test_x, test_y)
        for m, (state, momentum) in zip(norms, before, strict=True):
            m.load_state_dict(state)
            m.momentum = momentum
        return result

    def norms(self) -> list[float]:
        """The Euclidean norm of each layer's weight."""
        weights = [
            p.detach()
            for name, p in self.model.named_parameters()
            if name.endswith("weight") and p.dim() > 1
        ]
        return [round(float(w), 5) for w in torch.stack([w.norm() for w in weights]).cpu()]

    def small_variances(self) -> list[float]:
        """Per BN layer, the share of channels whose variance is below eps: not normalised there."""
        layers = [m for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        return [round(float((m.running_var < m.eps).float().mean()), 4) for m in layers]


def train(
    options: argparse.Namespace, data: dict[str, Tensor], device: torch.device, deadline: float
) -> dict:
    train_x, train_y, test_x, test_y = split(data, options, device)
    trainer = Trainer(options, device)
    generator = torch.Generator(device).manual_seed(options.seed + 1)
    start, rows, steps = time.perf_counter(), [], 0
    keys = "network bn affine aug optimizer decay lr wd init bn_eps bn_momentum precision batch"
    keys += " drop_last held_out limit"
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "options": {
            k: getattr(options, k) for k in (*keys.split(), "epochs", "drop_every", "seed")
        },
        "curve": rows,
    }
    print("RUN " + json.dumps(result["options"]), flush=True)
    for epoch in range(1, options.epochs + 1):
        trainer.set_lr(options.lr * 0.1 ** ((epoch - 1) // options.drop_every))
        x, y = shuffled(train_x, train_y, options.aug, generator)
        loss, accuracy, count = trainer.epoch(x, y, first=epoch == 1)
        steps += count
        test_loss, test_accuracy = trainer.evaluate(test_x, test_y)
        row = {
            "epoch": epoch,
            "steps": steps,
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "train_loss": loss,
            "train_accuracy": accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "seconds": time.perf_counter() - start,
            "norms": trainer.norms(),
        }
        due = options.reestimate_every and epoch % options.reestimate_every == 0
        last = epoch == options.epochs or not math.isfinite(loss) or time.perf_counter() > deadline
        if (due or last) and (again := trainer.reestimated(x, test_x, test_y)):
            row["reestimated_loss"], row["reestimated_accuracy"] = again
        rows.append(row)
        if epoch % options.print_every == 0 or last or epoch == 1:
            again = row.get("reestimated_accuracy")
            extra = "" if again is None else f"  reestimated {again:.2f}"
            print(
                f"{epoch:4d} lr {row['lr']:.1e}  train {loss:.5f} {accuracy:6.2f}  test"
                f" {test_loss:.4f} {test_accuracy:6.2f}  {row['seconds']:7.1f} s{extra}",
                flush=True,
            )
        if last:
            break
    ended = at_end(trainer, rows, *trainer.evaluate(train_x, train_y))
    ended["seconds"] = time.perf_counter() - start
    print("END " + json.dumps({"device": result["device"], **ended}), flush=True)
    return result | ended


def at_end(trainer: Trainer, rows: list[dict], train_loss: float, train_accuracy: float) -> dict:
    best = max(rows, key=lambda r: r["test_accuracy"])
    return {
        "finished": rows[-1]["epoch"] == trainer.options.epochs,
        "last": rows[-1]["test_accuracy"],
        "best": best["test_accuracy"],
        "best_epoch": best["epoch"],
        "norms": trainer.norms(),
        "train_loss_frozen": train_loss,
        "train_accuracy_frozen": train_accuracy,
        "reestimated": rows[-1].get("reestimated_accuracy"),
        "channels_below_eps": trainer.small_variances(),
    }


def settings(options: argparse.Namespace) -> list[argparse.Namespace]:
    """One namespace per entry of --grid; an option's default says how its value is read."""
    out = []
    for entry in (options.grid or "").split(";"):
        values = dict(vars(options))
        for pair in filter(None, entry.strip().split(",")):
            key, text = (part.strip() for part in pair.split("=", 1))
            key = key.replace("-", "_")
            assert key in values, f"--grid: no option {key}"
            kind = type(values[key])
            values[key] = text.lower() in ("1", "true", "yes") if kind is bool else kind(text)
        out.append(argparse.Namespace(**values))
    return out


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    flag = argparse.BooleanOptionalAction
    p.add_argument(
        "--data", type=Path, default=Path("data/cifar10"), help="folder of parquet files"
    )
    p.add_argument("--cache", type=Path, default=None, help="file that keeps the decoded images")
    p.add_argument("--network", choices=("vgg16", "resnet32"), default="vgg16")
    p.add_argument("--bn", action=flag, default=True)
    p.add_argument("--affine", action=flag, default=False, help="gamma and beta in BN")
    p.add_argument("--aug", action=flag, default=False)
    p.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    p.add_argument(
        "--decay",
        choices=("coupled", "decoupled"),
        default="coupled",
        help="SGD only; decoupled: W -= lr (velocity + wd W), outside the momentum, as K-FAC does",
    )
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--wd", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--drop-every", type=int, default=60)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--init", choices=("glorot", "kaiming"), default="glorot")
    p.add_argument("--bn-eps", type=float, default=1e-3)
    p.add_argument("--bn-momentum", type=float, default=0.01)
    p.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="tf32")
    p.add_argument(
        "--held-out", action=flag, default=False, help="train on 45,000, test on the other 5,000"
    )
    p.add_argument("--split-seed", type=int, default=0)
    p.add_argument("--drop-last", action=flag, default=False, help="train on full batches only")
    p.add_argument("--graph", action=flag, default=False, help="whole step in one CUDA graph")
    p.add_argument("--reestimate-every", type=int, default=0, help="epochs; 0: at the end only")
    p.add_argument(
        "--limit", type=int, default=0, help="use the first so many images of each split"
    )
    p.add_argument("--width", type=float, default=1.0)
    p.add_argument("--print-every", type=int, default=1)
    p.add_argument(
        "--grid", default="", help="settings run one after another: 'lr=0.1,wd=1e-3;lr=0.1,wd=3e-4'"
    )
    p.add_argument(
        "--max-seconds",
        type=float,
        default=math.inf,
        help="for all runs together; stops after an epoch",
    )
    p.add_argument("--json", type=Path, default=None, help="all curves, rewritten after each run")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    options.graph = options.graph and device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    began = time.perf_counter()
    data = load(options.data, options.cache)
    print(
        f"torch {torch.__version__}, {device}, data in {time.perf_counter() - began:.1f} s",
        flush=True,
    )
    deadline, results = began + options.max_seconds, []
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    # one side stream for everything, so that capture sees no other; None does nothing
    with torch.cuda.stream(stream):
        for setting in settings(options):
            if time.perf_counter() > deadline:
                print(
                    "OUT OF TIME before "
                    + json.dumps({"lr": setting.lr, "wd": setting.wd, "seed": setting.seed}),
                    flush=True,
                )
                continue
            tf32 = setting.precision != "fp32"
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
            results.append(train(setting, data, device, deadline))
            if options.json:
                options.json.write_text(json.dumps(results))
    for r in results:
        o, again = r["options"], r["reestimated"]
        shown = "" if again is None else f"{again:.2f}"
        print(
            f"{o['network']} bn={o['bn']:d} aug={o['aug']:d} {o['optimizer']} {o['decay']}"
            f" lr={o['lr']:g} wd={o['wd']:g} seed={o['seed']} {o['precision']}"
            f" held_out={o['held_out']:d}: last {r['last']:.2f}  best {r['best']:.2f}"
            f" (epoch {r['best_epoch']})  reestimated {shown}"
            f"  train {r['train_accuracy_frozen']:.2f}  {r['seconds']:.0f} s"
            f"{'' if r['finished'] else '  CUT SHORT'}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
