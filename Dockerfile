# scalelab with torch for CPUs, to measure and to report. Runs are written below /work: mount a directory there.
#
#   docker build -t scalelab .
#   docker run --rm -v "$PWD:/work" --shm-size 1g scalelab run strong-scaling --workload mlp --ranks 1 2
#
# For GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128, and docker run --gpus all --ipc host.
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" "$(echo /wheels/*.whl)[torch,text,formats,report,quantize]" \
    && rm -r /wheels \
    && useradd --create-home scalelab \
    && mkdir /work \
    && chown scalelab /work
USER scalelab
WORKDIR /work
ENTRYPOINT ["scalelab"]
CMD ["--help"]
