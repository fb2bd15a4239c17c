"""Turns recordings into codes and back into log-mel spectrograms, with a codec that learns in seconds: principal
components of a frame's log-mel patch, and a residual quantiser.

The checkpoint ships no codec, because nothing but code2wav has to understand codes; `Codec` is made beside it and
thrown away. Its own reconstruction is the ceiling of what code2wav can say.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from deploy.demo.speech_config import CODEBOOK_SIZE, FRAME_SAMPLES, NUM_CODEBOOKS, SAMPLE_RATE

NUM_MELS = 64
FFT_SIZE = 1024
HOP = 240
PATCH_STEPS = FRAME_SAMPLES // HOP
FLOOR = 3e-4
NUM_COMPONENTS = 96
_BEAM = 8
_REFITS = 4


@lru_cache(8)
def mel_matrix(num_mels: int, fft_size: int) -> torch.Tensor:
    """Returns triangular filters on the mel scale from 0 Hz to half of the sample rate. Has shape `(num_bins,
    num_mels)`."""
    top = 2595 * np.log10(1 + SAMPLE_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, num_mels + 2) / 2595) - 1)
    bins = np.linspace(0, SAMPLE_RATE / 2, fft_size // 2 + 1)
    rise = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    filters = np.maximum(0, np.minimum(rise, fall))
    return torch.from_numpy((filters / np.maximum(filters.sum(0), 1e-9)).astype(np.float32))


def log_mel(samples: torch.Tensor) -> torch.Tensor:
    """Returns natural logarithms of magnitudes, one step per `HOP` samples, the step's window centred in its hop. Maps
    `(..., num_samples)` to `(..., num_steps, NUM_MELS)`."""
    num_steps = samples.shape[-1] // HOP
    left = (FFT_SIZE - HOP) // 2
    padded = torch.nn.functional.pad(samples, (left, FFT_SIZE))
    window = torch.hann_window(FFT_SIZE, device=samples.device)
    frames = padded.unfold(-1, FFT_SIZE, HOP)[..., :num_steps, :]
    magnitudes = torch.fft.rfft(frames * (2 * window / window.sum())).abs()
    return torch.log((magnitudes @ mel_matrix(NUM_MELS, FFT_SIZE).to(samples.device)).clamp_min(FLOOR))


class Codec(NamedTuple):
    mean: torch.Tensor
    basis: torch.Tensor
    """Holds the principal components. Has shape `(PATCH_STEPS * NUM_MELS, NUM_COMPONENTS)`."""
    codebooks: torch.Tensor
    """Has shape `(NUM_CODEBOOKS, CODEBOOK_SIZE, NUM_COMPONENTS)`."""

    def encode(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Returns the codes of a recording. Has shape `(num_frames, NUM_CODEBOOKS)`."""
        return _beam_codes(self._components(patches(samples)), self.codebooks).numpy()

    def _components(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows - self.mean) @ self.basis

    def decode(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns the log-mel spectrogram of codes. Has shape `(num_frames * PATCH_STEPS, NUM_MELS)`."""
        chosen = self.codebooks[torch.arange(NUM_CODEBOOKS), torch.from_numpy(codes)].sum(1)
        rows = chosen @ self.basis.T + self.mean
        return np.asarray(rows.reshape(-1, NUM_MELS).numpy())


def patches(samples: npt.NDArray[np.float32]) -> torch.Tensor:
    """Returns the log-mel patch of each codec frame. Has shape `(num_frames, PATCH_STEPS * NUM_MELS)`."""
    return log_mel(torch.from_numpy(samples)).reshape(len(samples) // FRAME_SAMPLES, -1)


def fit(rows: torch.Tensor, seed: int) -> Codec:
    """Learns a codec from patches, of shape `(num_frames, PATCH_STEPS * NUM_MELS)`."""
    generator = torch.Generator().manual_seed(seed)
    mean = rows.mean(0)
    _, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean))
    basis = vectors.flip(1)[:, :NUM_COMPONENTS].contiguous()
    left = components = (rows - mean) @ basis
    books = []
    for _ in range(NUM_CODEBOOKS):
        book = _k_means(left, generator)
        left = left - book[_nearest(left, book)]
        books.append(book)
    codebooks = torch.stack(books)
    for _ in range(_REFITS):
        codebooks = _refit(components, _beam_codes(components, codebooks), codebooks)
    return Codec(mean, basis, codebooks)


def _nearest(rows: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    return (book.square().sum(1) - 2 * rows @ book.T).argmin(1)


def _k_means(rows: torch.Tensor, generator: torch.Generator, num_rounds: int = 25) -> torch.Tensor:
    book = rows[torch.randperm(len(rows), generator=generator)[:CODEBOOK_SIZE]].clone()
    for _ in range(num_rounds):
        nearest = _nearest(rows, book)
        counts = torch.bincount(nearest, minlength=CODEBOOK_SIZE)
        sums = torch.zeros_like(book).index_add_(0, nearest, rows)
        book = sums / counts.clamp_min(1)[:, None]
        # A centre that lost all its rows starts again at a row that is far from its own centre.
        empty = torch.nonzero(counts == 0).flatten()
        if len(empty):
            far = (rows - book[nearest]).square().sum(1).topk(len(empty)).indices
            book[empty] = rows[far]
    return book


def _beam_codes(rows: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Returns the codes whose sum is nearest, found with a beam over the codebooks."""
    every = [_beam_codes_of(part, codebooks) for part in rows.split(4096)]
    return torch.cat(every)


def _beam_codes_of(rows: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    left = rows[:, None]
    codes = torch.zeros(len(rows), 1, 0, dtype=torch.int64)
    for book in codebooks:
        distances = left.square().sum(2, keepdim=True) - 2 * left @ book.T + book.square().sum(1)
        width = distances.shape[1]
        best = distances.flatten(1).topk(min(_BEAM, width * len(book)), largest=False).indices
        parents, chosen = best // len(book), best % len(book)
        left = left.gather(1, parents[..., None].expand(-1, -1, left.shape[2])) - book[chosen]
        kept = codes.gather(1, parents[..., None].expand(-1, -1, codes.shape[2]))
        codes = torch.cat([kept, chosen[..., None]], 2)
    first = left.square().sum(2).argmin(1)
    return codes[torch.arange(len(rows)), first]


def _refit(rows: torch.Tensor, codes: torch.Tensor, codebooks: torch.Tensor) -> torch.Tensor:
    """Returns the codebooks whose sums come nearest to the rows for these codes (least squares, pulled faintly towards
    the old ones)."""
    size = codebooks.shape[0] * codebooks.shape[1]
    chosen = torch.zeros(len(rows), size)
    chosen.scatter_(1, codes + torch.arange(len(codebooks)) * codebooks.shape[1], 1.0)
    old = codebooks.reshape(size, -1)
    left = rows - chosen @ old
    change = torch.linalg.solve(chosen.T @ chosen + 0.5 * torch.eye(size), chosen.T @ left)
    refitted: torch.Tensor = (old + change).reshape(codebooks.shape)
    return refitted
