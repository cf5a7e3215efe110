# A gateway: the light install, without MLX.  docker build -f deploy/docker/gateway.Dockerfile -t phalanx-gateway .
FROM python:3.12-slim-bookworm AS wheels
COPY . /src
RUN python -m pip wheel --no-deps -w /wheels /src

FROM python:3.12-slim-bookworm
COPY --from=wheels /wheels /wheels
# By its file: an index may have a newer package of this name.
RUN python -m pip install --no-cache-dir --find-links /wheels "phalanx @ file://$(echo /wheels/phalanx-[0-9]*.whl)"
USER 65534:65534
EXPOSE 8080
# /version answers while the process lives; /health, only while a replica can take requests.
HEALTHCHECK CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8080/version', timeout=5)"]
ENTRYPOINT ["phalanx"]
CMD ["gateway", "--host", "0.0.0.0"]
