"""Calibration: published runs read, predicted and scored, cards fitted to them or to this machine, and written."""

from hyper_parallel.calibration._cells import RowError
from hyper_parallel.calibration._fit import CONSTANTS, Constant, Fit, fit_runs, write_cards
from hyper_parallel.calibration._local import (
    LocalRates,
    MeasuredStep,
    fastest_rates,
    fit_device,
    fit_stack,
    mean_rates,
)
from hyper_parallel.calibration._predict import (
    Cards,
    Prediction,
    predict,
    read_cards,
    shipped_cards,
)
from hyper_parallel.calibration._probes import fit_probes
from hyper_parallel.calibration._runs import PublishedRun, read_run
from hyper_parallel.calibration._runs_file import predict_file, read_runs
from hyper_parallel.calibration._write import write_card, write_own

__all__ = [
    "CONSTANTS",
    "Cards",
    "Constant",
    "Fit",
    "LocalRates",
    "MeasuredStep",
    "Prediction",
    "PublishedRun",
    "RowError",
    "fastest_rates",
    "fit_device",
    "fit_probes",
    "fit_runs",
    "fit_stack",
    "mean_rates",
    "predict",
    "predict_file",
    "read_cards",
    "read_run",
    "read_runs",
    "shipped_cards",
    "write_card",
    "write_cards",
    "write_own",
]
