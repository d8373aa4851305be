# HyperParallel on a CPU: plan for any machine, train and generate on simulated ranks.
#   docker build -t hyper-parallel .
#   docker run --rm -it -v "$PWD:/work" hyper-parallel plan llama-3-8b --topology dgx-h100
FROM python:3.12-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY recipes recipes
COPY src src
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    -c constraints/cpu.txt ".[torch]"
WORKDIR /work
ENTRYPOINT ["hyper-parallel"]
