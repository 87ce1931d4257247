#!/usr/bin/env python3
"""Tokens per second of the same training step in PyTorch: torch.compile, bf16 autocast over fp32
weights, cuDNN attention, fused AdamW, gradient clipping. The peer that `scripts/bench.sh` runs beside
`train_gpt`, on random tokens.

  bench_torch.py --model gpt2:124M --batch 64 --seq 1024 [--steps 20] [--recompute]
prints one line: tokens/s (median of the steps after the first five), ms a step, GiB of peak memory.
"""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

# family, layers, channels, heads, kv heads, ffn, vocabulary (padded to 128), rope theta, qkv bias, tied
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


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.family, _, C, self.H, self.Hk, ffn, _, _, bias, _ = shape
        self.D = C // self.H
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

    def forward(self, x, rope):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, -1, self.D).transpose(1, 2).split(
            (self.H, self.Hk, self.Hk), 1)
        if rope is not None:
            q, k = self.rotate(q, rope), self.rotate(k, rope)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.H != self.Hk)
        x = x + self.proj(o.transpose(1, 2).reshape(B, T, C))
        h = self.up(self.norm2(x))
        if self.family == "gpt2":
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, shape, seq, recompute):
        super().__init__()
        family, L, C, H, _, _, V, theta, _, tied = shape
        self.recompute = recompute
        self.wte = nn.Embedding(V, C)
        self.wpe = nn.Embedding(seq, C) if family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(L))
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

    def forward(self, ids, targets):
        x = self.wte(ids)
        rope = None
        if self.wpe is not None:
            x = x + self.wpe.weight[:ids.shape[1]]
        else:
            rope = (self.cos, self.sin)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, rope, use_reentrant=False)
            else:
                x = block(x, rope)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=SHAPES, default="gpt2:124M")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--seq", type=int, default=1024)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--recompute", action="store_true", help="checkpoint every block")
    a = p.parse_args()
    if a.steps <= 5:
        p.error("--steps: the first five are not counted, give more")
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model = Model(SHAPES[a.model], a.seq, a.recompute)
    decay = [w for w in model.parameters() if w.dim() > 1]
    rest = [w for w in model.parameters() if w.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                                   {"params": rest, "weight_decay": 0.0}],
                                  lr=3e-4, betas=(0.9, 0.95), fused=True)
    step = torch.compile(model)
    times = []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        for _ in range(a.steps):
            tokens = torch.randint(0, 32000, (a.batch, a.seq + 1), device="cuda")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = step(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    median = sorted(times[5:])[len(times[5:]) // 2]
    print(f"torch {a.model} {a.batch}x{a.seq}{' recompute' if a.recompute else ''}: "
          f"{a.batch * a.seq / median:.0f} tok/s {median * 1e3:.1f} ms "
          f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
