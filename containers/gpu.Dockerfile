# Sordino on an NVIDIA GPU. From the root of the repository, on a machine with the NVIDIA container toolkit:
#     docker build -f containers/gpu.Dockerfile -t sordino:gpu .
#     docker run --rm --gpus all sordino:gpu selftest --device cuda
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/sordino
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY src ./src
COPY benchmarks/results/experiments ./benchmarks/results/experiments
# The default wheel of torch for Linux brings the CUDA libraries that it needs; the driver is the host's.
RUN pip install -c requirements.lock '.[finetuning,export,vault]'

RUN useradd --create-home --uid 1000 trainer && mkdir -p /work/runs && chown -R trainer /work
USER trainer
WORKDIR /work
ENTRYPOINT ["sordino"]
CMD ["selftest", "--device", "cuda"]
