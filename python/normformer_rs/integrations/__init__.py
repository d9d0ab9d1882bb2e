"""Callbacks for other libraries' trainers: `huggingface.NormCallback` and `lightning.NormCallback`.

Both profile admin on the first batch, keep gains and the residual schemes' parameters out of weight decay, and log
learned gains and branchnorm's α_t.
"""
