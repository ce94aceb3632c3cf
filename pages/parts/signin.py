"""Sign-in through OpenID Connect, if the server's secrets configure it.

Section `[auth]` of `.streamlit/secrets.toml` is Streamlit's own (docs.streamlit.io: "User authentication"). Beside it,
`[ampscope] users = ["ann@example.org", "*@example.com"]` lists the allowed users; without it, every account of the
provider is allowed. Without `[auth]` there is no sign-in, and `ampscope serve` listens on loopback alone or is read-
only.
"""

import streamlit as st

from amp_core.library.permissions import has_sign_in, user_allowed


def require() -> None:
    """Continue for allowed users; show others a sign-in button or a sentence, and stop the page."""
    secrets = st.secrets.to_dict() if st.secrets.load_if_toml_exists() else {}
    if not has_sign_in(secrets):
        return
    if not st.user.is_logged_in:
        st.title("AMPscope", anchor=False)
        st.write("Sign in to see the runs of this server.")
        st.button("Sign in", icon=":material/login:", type="primary", on_click=st.login)
        st.stop()
    allowed = secrets.get("ampscope", {}).get("users")
    if not user_allowed(st.user.get("email"), st.user.get("email_verified"), allowed):
        st.error("This account may not see the runs of this server; ask its owner.", icon=":material/block:")
        st.button("Sign out", icon=":material/logout:", on_click=st.logout)
        st.stop()
    with st.sidebar:
        st.button("Sign out", icon=":material/logout:", type="tertiary", on_click=st.logout)
