"""OpenDiLoCo (arXiv 2407.07852) in plain torch, which islands are measured against."""

from __future__ import annotations

import copy

import torch


def train(model: torch.nn.Module, batches: torch.Tensor, lr: float) -> list[float]:
    """Train a model with a worker for each part of the data.

    Args:
        model: a causal model of transformers; it becomes the outer one.
        batches: int64 [outer steps, workers, inner steps, rows, tokens].
        lr: of the inner AdamW.

    Returns:
        The mean loss of the inner steps of each outer step.
    """
    workers = [copy.deepcopy(model) for _ in batches[0]]
    inner = [
        torch.optim.AdamW(worker.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
        for worker in workers
    ]
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    means = []
    for step in batches:
        losses = []
        for worker, optimizer, local in zip(workers, inner, step, strict=True):
            worker.load_state_dict(model.state_dict())
            for rows in local:
                loss = worker(input_ids=rows, labels=rows).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(worker.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        for outer_one, *own in zip(
            model.parameters(), *(worker.parameters() for worker in workers), strict=True
        ):
            outer_one.grad = torch.stack([outer_one.data - each.data for each in own]).mean(dim=0)
        outer.step()
        means.append(sum(losses) / len(losses))
    return means
