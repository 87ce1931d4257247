#!/usr/bin/env python3
"""Tokens per second of the same training step in PyTorch: torch.compile, bf16 autocast over fp32
weights, cuDNN attention, fused AdamW, gradient clipping. The peer that `scripts/bench.sh` runs
beside `train_gpt`, on random tokens.

  bench_torch.py --model gpt2:124M --batch 64 --seq 1024 [--steps 20] [--recompute]
  bench_torch.py --model gpt3:1.3B --batch 1 --seq 65536 --ranks 2 --seq-parallel ulysses|ring
  bench_torch.py --check [--ranks 2] [--seq-parallel ulysses|ring]
prints one line: tokens/s (median of the steps after the first five) of all ranks together, ms a
step, GiB of peak memory (of the fullest rank). --check compares loss and gradients of small models
with those of one rank; without enough GPUs in fp32 on the CPU.

Several ranks, one GPU each, share every sequence; each has all weights, DistributedDataParallel
averages the gradients during backward. ulysses: one all-to-all of packed q, k and v before
attention, one after. ring: torch.distributed.tensor.experimental.context_parallel with its defaults
(a rank has a piece of the sequence's head and one of its tail; keys by all-gather). The rest of a
block is compiled in two pieces.
"""
import argparse
import contextlib
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

# family, layers, channels, heads, kv heads, ffn, vocabulary (padded to 128), rope theta, qkv bias,
# tied
SHAPES = {
    "gpt2:124M": ("gpt2", 12, 768, 12, 12, 3072, 50304, 0, True, True),
    "gpt2:355M": ("gpt2", 24, 1024, 16, 16, 4096, 50304, 0, True, True),
    "gpt2:774M": ("gpt2", 36, 1280, 20, 20, 5120, 50304, 0, True, True),
    "gpt2:1558M": ("gpt2", 48, 1600, 25, 25, 6400, 50304, 0, True, True),
    "gpt3:1.3B": ("gpt2", 24, 2048, 16, 16, 8192, 50304, 0, True, True),
    "qwen2.5:1.5b": ("llama", 28, 1536, 12, 2, 8960, 151936, 1e6, True, True),
    "llama3.2:1b": ("llama", 16, 2048, 32, 8, 8192, 128256, 5e5, False, True),
    "llama2:7b": ("llama", 32, 4096, 32, 32, 11008, 32000, 1e4, False, False),
}


# Of --check: every branch of the model, head dim 64 for the GPU's kernels.
CHECK_SHAPES = {
    "gpt2": ("gpt2", 2, 256, 4, 4, 512, 512, 0, True, True),
    "llama": ("llama", 2, 256, 4, 2, 512, 512, 1e4, False, True),
}


class Attention:
    """Of whole sequences; q, k, v are B x heads x T x D. A subclass says where its tokens are."""

    def pack(self, q, k, v):
        return q, k, v

    def core(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                              enable_gqa=q.shape[1] != k.shape[1])

    def unpack(self, o):
        return o.transpose(1, 2).flatten(2)

    @contextlib.contextmanager
    def batch(self, tokens):
        """ids, targets and, unless they count from 0, positions of this rank."""
        yield tokens[:, :-1], tokens[:, 1:], None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


class Ulysses(Attention):
    """Outside of core a piece of the sequence and all heads, inside the whole and some heads."""

    def __init__(self, heads, kv_heads):
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.heads = [h // self.ranks for h in (heads, kv_heads, kv_heads)]

    def pack(self, q, k, v):
        parts = [t.unflatten(1, (self.ranks, -1)) for t in (q, k, v)]
        return (torch.cat(parts, 2).permute(1, 0, 3, 2, 4).contiguous(),)  # rank x B x T x h x D

    def core(self, packed):
        qkv = AllToAll.apply(packed).transpose(0, 1).flatten(1, 2)  # B x S x h x D
        o = super().core(*(t.transpose(1, 2) for t in qkv.split(self.heads, 2)))
        o = o.transpose(1, 2).unflatten(1, (self.ranks, -1)).transpose(0, 1)
        return AllToAll.apply(o)

    def unpack(self, o):
        return o.permute(1, 2, 0, 3, 4).flatten(2)

    @contextlib.contextmanager
    def batch(self, tokens):
        T = (tokens.shape[1] - 1) // self.ranks
        positions = torch.arange(self.rank * T, (self.rank + 1) * T, device=tokens.device)
        yield tokens[:, positions], tokens[:, positions + 1], positions


class Ring(Attention):
    """context_parallel replaces scaled_dot_product_attention while `batch` is open."""

    def __init__(self, device):
        self.mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))

    def core(self, q, k, v):
        group = q.shape[1] // k.shape[1]  # its merging of partial results knows no grouped heads
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    @contextlib.contextmanager
    def batch(self, tokens):
        from torch.distributed.tensor.experimental import context_parallel
        ids, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        positions = torch.arange(ids.shape[1], device=tokens.device)
        parts = [ids, targets, positions]  # cut in place, in the order of its load balancer
        with context_parallel(self.mesh, buffers=parts, buffer_seq_dims=[1, 1, 0],
                              no_restore_buffers=set(parts)):
            yield parts


class Block(nn.Module):
    def __init__(self, shape, recompute, attention):
        super().__init__()
        self.family, _, C, self.H, self.Hk, ffn, _, _, bias, _ = shape
        self.D = C // self.H
        self.recompute, self.attention = recompute, attention
        gpt = self.family == "gpt2"
        norm = nn.LayerNorm if gpt else nn.RMSNorm
        self.norm1, self.norm2 = norm(C), norm(C)
        self.qkv = nn.Linear(C, (self.H + 2 * self.Hk) * self.D, bias=bias)
        self.proj = nn.Linear(C, C, bias=gpt)
        self.up = nn.Linear(C, ffn if gpt else 2 * ffn, bias=gpt)
        self.down = nn.Linear(ffn, C, bias=gpt)

    def rotate(self, x, rope):
        a, b = x.float().chunk(2, -1)
        cos, sin = rope
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).type_as(x)

    def before(self, x, rope):
        B, T, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, -1, self.D).transpose(1, 2).split(
            (self.H, self.Hk, self.Hk), 1)
        if rope is not None:
            q, k = self.rotate(q, rope), self.rotate(k, rope)
        return self.attention.pack(q, k, v)

    def middle(self, x, o):
        x = x + self.proj(self.attention.unpack(o))
        h = self.up(self.norm2(x))
        if self.family == "gpt2":
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        return x, h

    def after(self, x, o):
        x, h = self.middle(x, o)
        return x + self.down(h)  # the last product: recomputing stops ahead of it

    def forward(self, x, rope):
        if self.recompute != "attention_out":
            return self.after(x, self.attention.core(*self.before(x, rope)))
        qkv = checkpoint(self.before, x, rope, use_reentrant=False)
        return checkpoint(self.after, x, self.attention.core(*qkv), use_reentrant=False)


class Model(nn.Module):
    def __init__(self, shape, seq, recompute, attention):
        super().__init__()
        family, L, C, H, _, _, V, theta, _, tied = shape
        self.recompute = recompute
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(seq, C) if family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(shape, recompute, attention) for _ in range(L))
        self.norm = (nn.LayerNorm if family == "gpt2" else nn.RMSNorm)(C)
        self.head = nn.Linear(C, V, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.rope = None
        if theta:
            D = C // H
            angles = torch.outer(torch.arange(seq).double(),
                                 theta ** (-torch.arange(0, D, 2).double() / D))
            self.register_buffer("cos", angles.cos().float())
            self.register_buffer("sin", angles.sin().float())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def embed(self, ids, positions):
        x = self.wte(ids)
        if self.wpe is None:
            rope = (self.cos, self.sin)
            return x, rope if positions is None else tuple(t[positions] for t in rope)
        where = self.wpe.weight[:ids.shape[1]] if positions is None else self.wpe(positions)
        return x + where, None

    def loss(self, x, targets):
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def forward(self, ids, targets, positions=None):
        x, rope = self.embed(ids, positions)
        for block in self.blocks:
            if self.recompute == "block":
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope)
        return self.loss(x, targets)


def attention_of(mode, shape, device):
    if mode is None:
        return Attention()
    return Ulysses(shape[3], shape[4]) if mode == "ulysses" else Ring(device)


def build(shape, seq, recompute, mode, device, backend):
    """The model, and what to call for a loss of it."""
    torch.manual_seed(1)
    with device:
        model = Model(shape, seq, recompute, attention_of(mode, shape, device))
    if mode is None:
        return model, torch.compile(model, backend=backend)
    # Collectives stay out of the compiler; what lies between them is compiled once for all blocks.
    torch._dynamo.config.optimize_ddp = False  # a piece is smaller than what it would be cut into
    for block in model.blocks:
        block.before = torch.compile(block.before, backend=backend)
        block.middle = torch.compile(block.middle, backend=backend)
    model.loss = torch.compile(model.loss, backend=backend)
    # A group of its own, so that gradients do not queue in front of attention's transfers.
    return model, DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None,
        process_group=dist.new_group(), broadcast_buffers=False, gradient_as_bucket_view=True)


def autocast(device):
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def over_ranks(x, device, op=dist.ReduceOp.SUM):
    x = torch.as_tensor(x, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(x, op)
    return x.item()


def train(a, device):
    model, step = build(SHAPES[a.model], a.seq, a.recompute, a.seq_parallel, device, "inductor")
    decay = [w for w in model.parameters() if w.dim() > 1]
    rest = [w for w in model.parameters() if w.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                                   {"params": rest, "weight_decay": 0.0}],
                                  lr=3e-4, betas=(0.9, 0.95), fused=True)
    times = []
    for _ in range(a.steps):
        tokens = torch.randint(0, 32000, (a.batch, a.seq + 1), device=device)
        with model.blocks[0].attention.batch(tokens) as (ids, targets, positions):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with autocast(device):
                loss = step(ids, targets, positions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    report(a, device, sorted(times[a.skip:]), loss.item())


def report(a, device, times, loss):
    median = times[len(times) // 2]
    peak = over_ranks(torch.cuda.max_memory_allocated(), device, dist.ReduceOp.MAX)
    loss = over_ranks(loss, device) / a.ranks
    if a.ranks > 1 and dist.get_rank() > 0:
        return
    recompute = {None: "", "block": " recompute"}.get(a.recompute, f" recompute {a.recompute}")
    ranks = f" {a.seq_parallel} {a.ranks} ranks" if a.seq_parallel else ""
    print(f"torch {a.model} {a.batch}x{a.seq}{recompute}{ranks}: "
          f"{a.batch * a.seq / median:.0f} tok/s {median * 1e3:.1f} ms "
          f"{peak / 2**30:.1f} GiB loss {loss:.3f}", flush=True)


def ring_on_cpu():
    """context_parallel has handlers of the GPU's kernels only; --check gives it the CPU's."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as cp
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def handler(op, args, kwargs):
        mesh = args[0].device_mesh
        local = [t.to_local() if isinstance(t, DTensor) else t for t in args]
        if op is forward:
            out = cp._templated_ring_attention(mesh.get_group(), 2, op, *local[:3],
                                               is_causal=local[4])
        else:
            out = cp._templated_ring_attention_backward(
                mesh.get_group(), 2, op, local[0], "grad_out", *local[1:6], dropout_p=local[6],
                is_causal=local[7])
        return [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in out]

    cp.custom_ops.update({forward: handler, backward: handler})


def gradients(shape, seq, recompute, mode, tokens):
    """Loss and all gradients, in one vector."""
    model, step = build(shape, seq, recompute, mode, tokens.device, "aot_eager")
    with model.blocks[0].attention.batch(tokens) as (ids, targets, positions):
        with autocast(tokens.device):
            loss = step(ids, targets, positions)
        loss.backward()
    return loss.item(), torch.cat([w.grad.flatten() for w in model.parameters()])


def check(a, device):
    if device.type == "cpu":
        ring_on_cpu()
    bound = 1e-5 if device.type == "cpu" else 2e-2
    cases = [(family, mode, recompute) for family in CHECK_SHAPES
             for mode in ("ulysses", "ring") if a.seq_parallel in (None, mode)
             for recompute in (None, "block", "attention_out")
             if not wrong_shape(CHECK_SHAPES[family], a.seq, mode, a.ranks)]
    failed = 0
    for family, mode, recompute in cases:
        torch._dynamo.reset()
        torch.manual_seed(2)
        tokens = torch.randint(0, 512, (2, a.seq + 1), device=device)
        loss1, grad1 = gradients(CHECK_SHAPES[family], a.seq, None, None, tokens)
        loss, grad = gradients(CHECK_SHAPES[family], a.seq, recompute, mode, tokens)
        loss = over_ranks(loss, device) / a.ranks
        norm1, norm = grad1.norm().item(), grad.norm().item()
        far = over_ranks((grad - grad1).norm() / norm1, device, dist.ReduceOp.MAX)
        good = abs(loss - loss1) < bound * loss1 and far < bound
        failed += not good
        if dist.get_rank() == 0:
            print(f"{'ok  ' if good else 'FAIL'} {family} {mode} recompute {recompute}: loss "
                  f"{loss1:.6f} {loss:.6f}, gradient {norm1:.6f} {norm:.6f}, off by {far:.1e}",
                  flush=True)
    if failed:
        sys.exit(f"{failed} of {len(cases)} differ from one rank" if dist.get_rank() == 0 else 1)


def run(rank, a, device_type, store):
    device = torch.device(device_type, rank if device_type == "cuda" else None)
    torch.set_float32_matmul_precision("high")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if a.ranks > 1:
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo",
                                init_method=f"file://{store}", rank=rank, world_size=a.ranks,
                                device_id=device if device_type == "cuda" else None)
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(kernels[a.attention == "flash":], set_priority=True):
        (check if a.check else train)(a, device)
    if a.ranks > 1:
        dist.destroy_process_group()


def wrong_shape(shape, seq, mode, ranks):
    heads, kv_heads = shape[3:5]
    if mode == "ulysses" and (heads % ranks or kv_heads % ranks):
        return f"{ranks} ranks do not divide {heads} heads and {kv_heads} kv heads"
    pieces = 2 * ranks if mode == "ring" else ranks if mode else 1
    if seq % pieces:
        return f"--seq {seq} is not a multiple of {pieces} (--seq-parallel {mode})"
    return None


def arguments():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=SHAPES, default="gpt2:124M")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--skip", type=int, default=5, help="first steps that are not counted")
    p.add_argument("--recompute", nargs="?", const="block", choices=("block", "attention_out"),
                   help="checkpoint every block, or all of it but attention")
    p.add_argument("--attention", choices=("cudnn", "flash"), default="cudnn")
    p.add_argument("--ranks", type=int, help="GPUs that share each sequence")
    p.add_argument("--seq-parallel", choices=("ulysses", "ring"))
    p.add_argument("--check", action="store_true",
                   help="compare several ranks with one, on GPUs when there are enough of them")
    a = p.parse_args()
    if a.ranks is None:
        a.ranks = 2 if a.check or a.seq_parallel else 1
    if not 0 <= a.skip < a.steps:
        p.error(f"--steps {a.steps}: the first {a.skip} are not counted, give more")
    if (a.ranks > 1) != bool(a.seq_parallel or a.check) or a.ranks < 1:
        p.error(f"--ranks {a.ranks}: give 2 or more with --seq-parallel or --check, else none")
    if a.check:
        a.seq = 128 * a.ranks
    shapes = CHECK_SHAPES.values() if a.check else [SHAPES[a.model]]
    wrong = [wrong_shape(shape, a.seq, a.seq_parallel, a.ranks) for shape in shapes]
    if all(wrong):
        p.error(wrong[0])
    if not a.check and torch.cuda.device_count() < a.ranks:
        p.error(f"GPUs needed: {a.ranks}, PyTorch sees {torch.cuda.device_count()}")
    return a


def main():
    a = arguments()
    device = "cuda" if torch.cuda.device_count() >= a.ranks else "cpu"
    if a.ranks == 1:
        return run(0, a, device, None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(run, (a, device, os.path.join(folder, "store")), a.ranks)
        except torch.multiprocessing.ProcessExitedException as e:
            sys.exit(f"error: {e}")
        except torch.multiprocessing.ProcessRaisedException as e:
            sys.exit(f"{str(e).strip()}\nerror: {str(e).strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
