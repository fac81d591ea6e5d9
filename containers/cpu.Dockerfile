# Sordino on a processor. From the root of the repository:
#     docker build -f containers/cpu.Dockerfile -t sordino:cpu .
#     docker run --rm -v "$PWD/runs:/work/runs" sordino:cpu demo
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
WORKDIR /opt/sordino
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src ./src
COPY benchmarks/results/experiments ./benchmarks/results/experiments
# Torch comes from the source of CPU builds: the default wheel for Linux brings gigabytes of CUDA.
RUN pip install --index-url https://download.pytorch.org/whl/cpu "$(grep '^torch==' requirements.lock)" \
    && pip install -c requirements.lock '.[export,excel,vault]'

# Nobody needs root to train, and a run folder should belong to a user.
RUN useradd --create-home --uid 1000 trainer && mkdir -p /work/runs && chown -R trainer /work
USER trainer
WORKDIR /work
ENTRYPOINT ["sordino"]
CMD ["--help"]
