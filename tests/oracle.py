"""The rules in numpy float64, written from the formulas alone: what every implementation is compared with."""

import numpy as np


def indexer_logits(q, k, weights, starts, ends, k_scale=None):
    """[M, N]: k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n]) inside [starts, ends), -inf outside."""
    q, k, weights = (np.asarray(x).astype(np.float64) for x in (q, k, weights))
    logits = np.zeros((q.shape[0], k.shape[0]))
    for h in range(q.shape[1]):
        logits += weights[:, h, None] * np.maximum(q[:, h] @ k.T, 0.0)
    if k_scale is not None:
        logits *= np.asarray(k_scale, np.float64)[None]
    columns = np.arange(k.shape[0])[None]
    inside = (columns >= np.asarray(starts)[:, None]) & (columns < np.asarray(ends)[:, None])
    return np.where(inside, logits, -np.inf)


def topk_row(scores, k, start=0, end=None):
    """The k greatest of scores[start:end], lowest column first among equals; in ascending column order, then -1."""
    scores = np.asarray(scores)
    end = len(scores) if end is None else min(end, len(scores))
    columns = np.arange(max(start, 0), max(end, max(start, 0)))
    values = scores[columns]
    columns = columns[~np.isnan(values) & (values != -np.inf)]
    best_first = np.argsort(-(scores[columns] + 0.0), kind="stable")
    chosen = np.sort(columns[best_first[:k]])
    return np.concatenate([chosen, np.full(k - len(chosen), -1)]).astype(np.int32)


def topk_indices(scores, k, starts=None, ends=None):
    """topk_row for every row of scores[M, N]."""
    m, n = scores.shape
    starts = np.zeros(m, int) if starts is None else np.asarray(starts)
    ends = np.full(m, n) if ends is None else np.asarray(ends)
    rows = [topk_row(np.asarray(scores[i]), k, starts[i], ends[i]) for i in range(m)]
    return np.stack(rows) if rows else np.zeros((0, k), np.int32)


def sparse_mla(q, kv, indices, *, sm_scale, v_dim, lengths=None, sink=None):
    """out[M, H, v_dim] and natural-log lse[M, H] over each row's valid indices; the sink joins out's sum alone."""
    q, kv = np.asarray(q).astype(np.float64), np.asarray(kv).astype(np.float64)
    m, h, _ = q.shape
    out, lse = np.zeros((m, h, v_dim)), np.full((m, h), -np.inf)
    for row in range(m):
        chosen = np.asarray(indices[row])
        if lengths is not None:
            chosen = chosen[: max(int(lengths[row]), 0)]
        chosen = chosen[(chosen >= 0) & (chosen < kv.shape[0])]
        if len(chosen) == 0:
            continue
        logits = sm_scale * q[row] @ kv[chosen].T
        top = logits.max(axis=-1, keepdims=True)
        weight = np.exp(logits - top)
        total = weight.sum(axis=-1, keepdims=True)
        lse[row] = (top + np.log(total))[:, 0]
        out[row] = weight @ kv[chosen, :v_dim] / total
        if sink is not None:
            out[row] /= 1.0 + np.exp(np.asarray(sink, np.float64) - lse[row])[:, None]
    return out, lse


def dense_mla(q, k, v, starts, ends, *, sm_scale):
    """Multi-head attention over k[starts:ends] for every row: out[M, H, v] and lse[M, H]."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    m, h, _ = q.shape
    out, lse = np.zeros((m, h, v.shape[-1])), np.full((m, h), -np.inf)
    for row in range(m):
        keys = slice(max(int(starts[row]), 0), min(int(ends[row]), k.shape[0]))
        if keys.stop <= keys.start:
            continue
        logits = sm_scale * np.einsum("hd,nhd->hn", q[row], k[keys])
        top = logits.max(axis=-1, keepdims=True)
        weight = np.exp(logits - top)
        lse[row] = (top + np.log(weight.sum(-1, keepdims=True)))[:, 0]
        out[row] = np.einsum("hn,nhv->hv", weight / weight.sum(-1, keepdims=True), v[keys])
    return out, lse
