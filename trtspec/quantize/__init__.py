"""Calibrate and quantize a checkpoint with NVIDIA ModelOpt, check the result, write it whole.

``python -m trtspec.quantize --model DIR --out DIR --quantization JSON`` is how a build calls it: a process
of its own, so that its memory is returned. The order of work:

1. :mod:`~trtspec.quantize.preflight`: everything that can be refused without loading the model;
2. :mod:`~trtspec.quantize.calibration`: texts, packed into rows of tokens;
3. :mod:`~trtspec.quantize.ptq`: load, calibrate, search, export;
4. :mod:`~trtspec.quantize.finish`: what the exporter gets wrong or leaves out;
5. :mod:`~trtspec.quantize.readback`: the folder is read from disk again, dequantized and compared with
   the source; :mod:`~trtspec.quantize.checks` decide whether it may be used.

Importing this package imports no torch.
"""

from trtspec.quantize.report import LayerReport, Report, read_report
from trtspec.quantize.run import quantize

__all__ = ["LayerReport", "Report", "quantize", "read_report"]
