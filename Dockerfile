# scalelab with torch, to measure and to report. Runs are written below /job: mount a directory there.
#
#   docker build -t scalelab .
#   docker run --rm -v "$PWD:/job" --shm-size 1g scalelab run strong-scaling --workload mlp --ranks 1 2
#
# pip's own choice of torch has CUDA: add `docker run --gpus all --ipc host`. For another build of torch, pass the index
# that has it: --build-arg PIP_EXTRA_INDEX_URL=…
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[torch,text,formats,report,quantize]" \
    && rm -r /wheels \
    && useradd --create-home scalelab \
    && mkdir /job \
    && chown scalelab /job
USER scalelab
WORKDIR /job
ENTRYPOINT ["scalelab"]
CMD ["--help"]
