# Sordino on a processor. From the root of the repository:
#     docker build -f containers/cpu.Dockerfile --build-arg TORCH_INDEX=... -t sordino:cpu .
# TORCH_INDEX is the address of PyTorch's CPU builds (see "Get started" on PyTorch's site), or of your mirror of them.
#     docker run --rm -v "$PWD/runs:/work/runs" sordino:cpu demo
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
WORKDIR /opt/sordino
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src ./src
COPY benchmarks/results/experiments ./benchmarks/results/experiments
# Without TORCH_INDEX, torch comes from pip's own source: the default wheel for Linux brings gigabytes of CUDA.
ARG TORCH_INDEX=
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements.lock)" \
    && pip install -c requirements.lock '.[export,excel,vault]'

# Nobody needs root to train, and a run folder should belong to a user.
RUN useradd --create-home --uid 1000 trainer && mkdir -p /work/runs && chown -R trainer /work
USER trainer
WORKDIR /work
ENTRYPOINT ["sordino"]
CMD ["--help"]
