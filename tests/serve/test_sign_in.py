"""Sign-in through OpenID Connect on a real server, with a provider on the loopback address."""

import os
from collections.abc import Iterator

import pytest

from tests import synthetic
from tests.serve.running import Server, run_async, serving
from tests.serve.viewer import Seen, Viewer

pytest.importorskip("authlib", reason="sign-in needs Authlib: pip install '.[auth]'")
pytest.importorskip("joserfc", reason="the provider signs with joserfc, which Authlib brings from 1.7 on")
pytest.importorskip("httpx", reason="Authlib asks the provider through httpx: pip install '.[auth]'")

from tests.serve.provider import CLIENT, Provider, cookies_after, provider

SECRETS = """
[auth]
redirect_uri = "http://127.0.0.1:{{port}}/oauth2callback"
cookie_secret = "{secret}"
client_id = "{client}"
client_secret = "of-the-test"
server_metadata_url = "{base}/.well-known/openid-configuration"

[ampscope]
users = ["ann@example.org", "*@example.com"]
"""
ANN = {"email": "ann@example.org", "email_verified": True}


@pytest.fixture(scope="module")
def oidc() -> Iterator[Provider]:
    with provider() as result:
        yield result


@pytest.fixture(scope="module")
def server(oidc: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a run that only signed-in users may see."""
    home = tmp_path_factory.mktemp("signed")
    synthetic.write(home / "runs" / "private-run", "healthy", steps=20)
    (home / ".streamlit").mkdir()
    secrets = SECRETS.format(secret=os.urandom(16).hex(), client=CLIENT, base=oidc.base)
    (home / ".streamlit" / "secrets.toml").write_text(secrets)
    with serving(home / "runs") as result:
        yield result


def see(server: Server, cookie: str = "", press: str | None = None) -> Seen:
    """The content for a browser with that cookie, after a button press."""

    async def look() -> Seen:
        async with Viewer(server.base, headers={"Cookie": cookie} if cookie else {}) as viewer:
            shown = await viewer.open("", run="run/private-run")
            return shown if press is None else await viewer.press(shown.widget("button", press))

    return run_async(look())


def sign_in(server: Server, oidc: Provider, account: dict[str, object], *, forged: bool = False) -> str:
    """Press the button, follow the redirects, and return the cookies."""
    oidc.account, oidc.forged = account, forged
    where = see(server, press="Sign in").sent_to
    assert where.startswith("/auth/login?")
    return cookies_after(server.base + where, f"{server.base}/_stcore/health")


def is_signed_in(shown: Seen) -> bool:
    """Whether the run is shown; checks that otherwise nothing of it is."""
    assert not shown.errors
    signed_in = "private-run" in shown.words
    assert signed_in or ("private-run" not in str(shown.elements) and not shown.of("plotly_chart"))
    return signed_in


def test_an_anonymous_visitor_must_sign_in(server: Server) -> None:
    shown = see(server)
    assert not is_signed_in(shown) and shown.widget("button", "Sign in") is not None


@pytest.mark.parametrize("email", ["ann@example.org", "bob@example.com"])
def test_allowed_users_can_sign_in_and_out(server: Server, oidc: Provider, email: str) -> None:
    cookie = sign_in(server, oidc, ANN | {"email": email})
    shown = see(server, cookie)
    assert is_signed_in(shown) and shown.widget("button", "Sign out") is not None
    assert see(server, cookie, press="Sign out").sent_to.startswith("/auth/logout")


@pytest.mark.parametrize(
    "account",
    [
        ANN | {"email": "eve@example.org"},
        ANN | {"email": "ann@example.org.evil"},
        ANN | {"email_verified": False},
        {"name": "Ann"},
    ],
)
def test_accounts_that_are_not_allowed_are_refused(server: Server, oidc: Provider, account: dict[str, object]) -> None:
    shown = see(server, sign_in(server, oidc, account))
    assert not is_signed_in(shown) and "may not see the runs" in shown.words


def test_a_token_with_a_foreign_signature_is_refused(server: Server, oidc: Provider) -> None:
    shown = see(server, sign_in(server, oidc, ANN, forged=True))
    assert not is_signed_in(shown) and shown.widget("button", "Sign in") is not None


def test_a_modified_cookie_is_refused(server: Server, oidc: Provider) -> None:
    cookie = sign_in(server, oidc, ANN)
    value = cookie.partition("_streamlit_user=")[2].partition(";")[0]
    at = len(value) // 2
    changed = value[:at] + ("B" if value[at] == "A" else "A") + value[at + 1 :]
    assert not is_signed_in(see(server, cookie.replace(value, changed)))


def test_an_unrequested_code_is_refused(server: Server) -> None:
    assert not is_signed_in(see(server, cookies_after(f"{server.base}/oauth2callback?code=x&state=y")))
