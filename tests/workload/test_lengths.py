"""Length distributions: known moments, point masses, coupling, and the shipped tables against their sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import SimctlError
from sim.workload.lengths import Fixed, Uniform, draw_lengths, normal_cdf, parse_lengths
from sim.workload.quantiles import quantile_table, quantile_tables
from sim.workload.stats import spearman
from sim.workload.streams import stream

N = 40_000


def draw(prompt, output, rho=0.0, n=N, seed=0):
    return draw_lengths(prompt, output, n, (stream(seed, "prompts"), stream(seed, "outputs")), rho)


def parse(value, key="prompt_tokens"):
    return parse_lengths(value, key)


def test_a_number_is_that_length():
    assert parse(1200).of_normal(np.zeros(3)).tolist() == [1200] * 3


def test_uniform_includes_both_ends_equally():
    lengths, _ = draw(parse({"uniform": [3, 7]}), Fixed(1))
    assert np.bincount(lengths)[3:].tolist() == pytest.approx([N / 5] * 5, rel=0.05)
    assert lengths.max() == 7


def test_lognormal_has_the_median_and_spread_and_keeps_its_limits():
    lengths, _ = draw(parse({"lognormal": {"median": 1000, "sigma": 0.5}}), Fixed(1))
    assert np.median(lengths) == pytest.approx(1000, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.5, rel=0.02)
    held, _ = draw(parse({"lognormal": {"median": 1000, "sigma": 0.8, "min": 300, "max": 6000}}), Fixed(1))
    assert (held.min(), held.max()) == (300, 6000)


@pytest.mark.parametrize("name", quantile_tables())
def test_tables_give_back_their_percentiles_and_means(name):
    table = quantile_table(name)
    u = (np.arange(200_000) + 0.5) / 200_000
    for marginal in (table.prompt, table.output):
        x = marginal.sample(u)
        # one per cent is the one table whose tail already lies above its mean (servegen-mm-image)
        assert x.mean() == pytest.approx(marginal.mean, rel=0.013)
        np.testing.assert_allclose(
            np.percentile(x, range(1, 100)), marginal.percentiles[1:100], rtol=0.02, atol=1.0
        )
        assert x.max() <= marginal.percentiles[100]


def test_point_masses_survive():
    u = (np.arange(100_000) + 0.5) / 100_000
    code = quantile_table("azure-code-2023").prompt.sample(u)
    assert np.mean(code >= 7434) == pytest.approx(
        0.038, abs=0.006
    )  # the truncation limit, 3.8 % of the trace
    conv = quantile_table("azure-conv-2023").prompt.sample(u)
    assert np.mean(conv == 181) >= 0.01


def test_a_table_couples_as_its_trace_does():
    table = quantile_table("arxiv-pod")
    prompt, output = draw(
        parse({"quantiles": "arxiv-pod"}), parse({"quantiles": "arxiv-pod"}, "output_tokens"), 0.7047
    )
    assert spearman(prompt, output) == pytest.approx(0.7047, abs=0.01)
    assert np.mean(prompt + output > 16384) == pytest.approx(
        0.2059, abs=0.01
    )  # measured on the trace: 20.59 %
    assert prompt.mean() == pytest.approx(table.prompt.mean, rel=0.02)


@pytest.mark.parametrize("rho", [-0.9, -0.5, 0.0, 0.3, 0.95])
def test_copula_gives_the_rank_correlation_asked_for(rho):
    wide = {"lognormal": {"median": 1e5, "sigma": 0.5}}
    assert spearman(*draw(parse(wide), Uniform(1, 10**6), rho)) == pytest.approx(rho, abs=0.015)


def test_prompts_do_not_change_with_the_outputs():
    prompt = parse({"uniform": [1, 10**6]})
    a, _ = draw(prompt, Fixed(1))
    b, _ = draw(prompt, parse({"uniform": [1, 50]}), 0.5)
    np.testing.assert_array_equal(a, b)


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=50))
def test_lengths_never_fall_as_the_normal_rises(zs):
    z = np.sort(np.array(zs))
    specs = (
        7,
        {"uniform": [2, 9]},
        {"lognormal": {"median": 50, "sigma": 2, "max": 900}},
        {"quantiles": "bwb"},
    )
    for spec in specs:
        lengths = parse(spec).of_normal(z)
        assert np.all(np.diff(lengths) >= 0)
        assert np.all(lengths >= 1)


def test_normal_cdf_at_known_points():
    np.testing.assert_allclose(
        normal_cdf(np.array([0.0, 1.96, -1.0])), [0.5, 0.9750021, 0.1586553], atol=1e-7
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("many", r"workload\.prompt_tokens: 'many' is not a length; give a number, \{uniform"),
        (0, "not a whole number of at least 1"),
        (1.5, "not a whole number"),
        (True, "is not a length"),
        (
            {"unifrom": [1, 2]},
            r"workload\.prompt_tokens\.unifrom: no such distribution.*Did you mean 'uniform'",
        ),
        ({"uniform": [9, 2]}, "wrong way round"),
        ({"uniform": 5}, r"is not \[a, b\]"),
        ({"lognormal": {"median": 10, "sigma": 1, "mx": 5}}, r"lognormal\.mx: unknown key.*Did you mean"),
        ({"lognormal": {"median": 10}}, r"lognormal\.sigma: None is not a positive number"),
        ({"lognormal": {"median": 10, "sigma": 1, "min": 9, "max": 5}}, "min 9 is above max 5"),
        ({"lognormal": 5}, "is not a block"),
        ({"quantiles": "azure-conv"}, r"no quantile table 'azure-conv'.*Did you mean 'azure-co"),
        ({"uniform": [1, 2], "quantiles": "bwb"}, "is not a length"),
    ],
)
def test_bad_lengths_are_refused(value, message):
    with pytest.raises(SimctlError, match=message):
        parse(value)
