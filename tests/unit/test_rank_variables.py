"""Which variables a hostfile, a flag or a server may set for ranks, and what the refusal of others says."""

from __future__ import annotations

import string

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.rank_variables import ALLOWED, PLACES, REFUSED, check_variable, read_variable, why_refused

NAMES = st.text(string.ascii_uppercase + string.digits + "_", min_size=1, max_size=24).filter(
    lambda name: not name[0].isdigit()
)
PATTERNS = [pattern for rule in ALLOWED for pattern in rule.names]
OPEN = [pattern.removesuffix("*") for pattern in PATTERNS if pattern.endswith("*")]
"""Beginnings of names that allow any rest."""
OWN = "it is phalanx's own"
CODE = "it chooses code that a program loads or runs"
PLACE = "it names a file, a directory or a program"
LIES = "it says where files lie"
UNKNOWN = "it is not one of those that are known to choose no code"


@pytest.mark.parametrize(
    "entry",
    ["MLX_METAL_FAST_SYNCH=1", "MLX_MAX_OPS_PER_BUFFER=100", "MLX_MEMORY_GUARD_GB=3", "MLX_RING_VERBOSE=1",
     "OMP_NUM_THREADS=4", "OMP_PROC_BIND=close", "OPENBLAS_NUM_THREADS=1",
     "OMPI_MCA_btl_tcp_if_include=en0", "OMPI_MCA_btl=self,tcp", "OMPI_MCA_pml=ucx",
     "OMPI_MCA_coll_tuned_allreduce_algorithm=4", "OMPI_MCA_oob_tcp_if_include=10.0.0.0/24",
     "NCCL_DEBUG=", "NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME==eth0", "NCCL_IB_HCA=mlx5_0:1", "NCCL_IB_GID_INDEX=3",
     "NCCL_P2P_DISABLE=1", "NCCL_NET_GDR_LEVEL=SYS", "NCCL_MIN_NCHANNELS=4", "NCCL_ALGO=Ring",
     "UCX_TLS=rc,sm,self", "UCX_NET_DEVICES=mlx5_0:1", "UCX_IB_GPU_DIRECT_RDMA=yes", "UCX_IB_SUBNET_PREFIX=fe80::",
     "CUDA_VISIBLE_DEVICES=0", "CUDA_MODULE_LOADING=EAGER", "HF_HUB_OFFLINE=1", "TOKENIZERS_PARALLELISM=false"],
)  # fmt: skip
def test_what_people_set_may_be_set(entry: str) -> None:
    name, value = read_variable(entry, "x")
    assert f"{name}={value}" == entry


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("PHALANX_API_KEY", "PHALANX_GROUP_SECRET", "MLX_RANK", "MLX_HOSTFILE", "NCCL_PORT"), OWN),
        (("LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "PYTHONPATH", "PYTHONSTARTUP", "BASH_ENV", "GLIBC_TUNABLES",
          "MLX_MPI_LIBNAME", "OPAL_PKGLIBDIR", "UCX_MODULE_DIR", "OMP_TOOL_LIBRARIES", "NCCL_NET", "OPENSSL_CONF",
          "CUDA_INJECTION64_PATH"), CODE),
        (("TMPDIR", "HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "HF_HOME"), LIES),
        (("PATH", "CUDA_CACHE_PATH", "NCCL_DEBUG_FILE", "GCC_EXEC_PREFIX", "UCX_CONFIG_DIR", "MLX_PTX_CACHE_DIR",
          "MLX_CCCL_DIR", "NCCL_NET_PLUGIN", "NCCL_CONF_FILE", "NCCL_TOPO_FILE", "UCX_LOG_FILE", "PMIX_LIBDIR_PATH",
          "FI_PROVIDER_PATH", "OMPI_MCA_mca_base_component_path", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent",
          "OMPI_MCA_mca_base_param_files", "OMPI_MCA_btl_sm_backing_directory",
          "OMPI_MCA_coll_tuned_dynamic_rules_filename", "OMPI_MCA_coll_han_use_dynamic_file_rules"), PLACE),
        (("A", "CC", "CUDA_HOME", "HTTPS_PROXY", "HF_TOKEN", "HF_ENDPOINT", "PMIX_LIBDIR", "EDITOR", "OMPI_PREFIX",
          "OMPI_MCA_pml_monitoring_enable", "MLX_OF_TOMORROW", "nccl_debug", "omp_num_threads", "MLX_RESIDENCY"),
         UNKNOWN),
    ],
)  # fmt: skip
def test_what_chooses_code_or_files_may_not_and_the_refusal_says_of_which_kind_it_is(
    names: tuple[str, ...], reason: str
) -> None:
    for name in names:
        with pytest.raises(ConfigError) as refused:
            read_variable(f"{name}=/x", "hosts.json: envs")
        assert refused.value.message.startswith(f"hosts.json: envs: {name} may not be set for ranks: {reason}")
        assert "set it on its host" in str(refused.value.remedy) and "docs/clusters.md" in str(refused.value.remedy)


@given(NAMES)
@example("CUDA_CACHE_PATH")
def test_a_name_that_is_on_no_list_is_refused(name: str) -> None:
    assume(name not in PATTERNS and not name.startswith(tuple(OPEN)))
    assert why_refused(name)
    with pytest.raises(ConfigError, match="may not be set for ranks"):
        check_variable(name, "x", "--env")


@given(st.sampled_from(OPEN), st.sampled_from(sorted(PLACES)), NAMES, st.booleans())
def test_no_beginning_of_a_name_allows_a_file_a_directory_or_a_program(
    beginning: str, word: str, rest: str, lower: bool
) -> None:
    for name in (f"{word}_{rest}", f"{rest}_{word}", word):
        name = beginning + (name.lower() if lower else name)
        assert why_refused(name) == PLACE


@given(st.sampled_from([pattern for rule in REFUSED for pattern in rule.names]), NAMES)
def test_nothing_allows_what_is_refused_by_name(pattern: str, rest: str) -> None:
    assert why_refused(pattern.replace("*", rest)) in [rule.reason for rule in REFUSED]


@given(st.text(max_size=20), st.text(max_size=20), st.sampled_from(["", *PATTERNS]))
def test_only_a_name_of_the_list_with_one_line_of_text_passes(name: str, value: str, pattern: str) -> None:
    try:
        read = read_variable(f"{pattern.replace('*', 'X')}{name}={value}", "--env")
    except ConfigError as error:
        assert error.message.startswith("--env: ")
    else:
        assert any(read[0] == pattern or read[0].startswith(pattern[:-1]) for pattern in PATTERNS)
        assert read[1].isprintable() or not any(ord(char) < 32 or ord(char) == 127 for char in read[1])


def test_the_server_may_set_what_phalanx_itself_sets() -> None:
    check_variable("MLX_RANK", "1", "the server", except_for=("MLX_RANK",))
    with pytest.raises(ConfigError, match="the server: MLX_RANK may not"):
        check_variable("MLX_RANK", "1", "the server", except_for=("PHALANX_CPU_KERNELS",))


@pytest.mark.parametrize("entry", ["A", "=x", "A B=x", "A\n=x", "Ä=x", "", "1A=x", "A\0=x"])
def test_names_of_variables(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"^--env: .*(has no value|is not the name of a variable)"):
        read_variable(entry, "--env")


@pytest.mark.parametrize("value", ["x\ny", "x\0", "x\ry", "\x1b[2J"])
def test_values_are_one_line(value: str) -> None:
    with pytest.raises(ConfigError, match="--env: the value of NCCL_DEBUG has a line break"):
        check_variable("NCCL_DEBUG", value, "--env")
