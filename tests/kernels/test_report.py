"""kernels/README.md says what kernels/results holds."""

import json

from tests.benchmarks import report


def test_the_table_of_the_readme_is_made_from_the_stored_figures() -> None:
    results = json.loads(report.RESULTS.read_text())
    text = report.README.read_text()
    assert report.with_report(text, report.markdown(results)) == text


def test_every_figure_is_of_one_run_of_one_machine() -> None:
    results = json.loads(report.RESULTS.read_text())
    figures = report.figures_of(results)
    keys = [(f.task, f.model, f.ranks, f.contender) for f in figures]
    assert len(set(keys)) == len(keys)
    assert {"gpu", "torch", "triton", "copy_bytes_per_s"} <= results["machine"].keys()
