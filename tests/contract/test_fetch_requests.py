"""Asks a router over real HTTP about media that a real server has, through the process that fetches: with the OpenAI
library, by http and https, and with URLs that lead to a forbidden address."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from chat_media import picture, png
from media_servers import local_names, media_server, response, write_certificate
from router_chats import expected

from deploy.http_server import HttpServer
from deploy.testing import TINY_MODEL, fake_cluster
from router.edge import create_app
from router.fetch import FetchProcess, FetchSettings

TEXT = {"type": "text", "text": "what is this?"}


async def ask(client: openai.AsyncOpenAI, url: str) -> openai.types.chat.ChatCompletion:
    content = [TEXT, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    return await client.chat.completions.create(model=TINY_MODEL, messages=messages, seed=7)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_picture_by_url_is_answered_and_a_forbidden_one_is_not(scheme: str, tmp_path: Path) -> None:
    public, context = write_certificate(tmp_path)
    pages = {"/cat.png": response(png(picture(1)))}
    async with media_server(pages, tls=context if scheme == "https" else None) as server:
        pages = server.pages
        pages["/out"] = response(b"", "302 Found", location=server.url("/cat.png", "forbidden.test", scheme))
        settings = FetchSettings(
            schemes=(scheme,), allowed_ports=(server.port,), allowed_networks=("127.0.0.2/32",), ca_file=public
        )
        async with fake_cluster(fetcher=FetchProcess(settings, local_names)) as cluster:
            edge = HttpServer(create_app(cluster.service), "127.0.0.1", 0)
            await edge.start()
            url = f"http://127.0.0.1:{edge.port}/v1"
            try:
                async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=2) as client:
                    answer = await ask(client, server.url("/cat.png", "media.test", scheme))
                    assert answer.choices[0].message.content == expected(cluster)
                    for path, host in (("/cat.png", "forbidden.test"), ("/cat.png", "127.1"), ("/out", "media.test")):
                        with pytest.raises(openai.BadRequestError) as refused:
                            await ask(client, server.url(path, host, scheme))
                        assert (refused.value.code, refused.value.param) == ("url_refused", "messages.0.content.1")
                    with pytest.raises(openai.UnprocessableEntityError) as missing:
                        await ask(client, server.url("/dog.png", "media.test", scheme))
                    assert missing.value.code == "media_unreachable"
                    assert [asked.target for asked in server.asked].count("/dog.png") == 1
            finally:
                await edge.stop()
