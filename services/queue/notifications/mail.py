"""Sends a notification by e-mail, in a thread."""

from __future__ import annotations

import asyncio
import smtplib
import ssl
from concurrent.futures import Executor
from email.message import EmailMessage
from email.utils import formatdate

from cotenant.services.queue.notifications.rules import SmtpRules
from cotenant.services.queue.notifications.webhook import Undelivered

PERMANENT = 500  # replies from here on say that a repeat is useless


class Mailer:
    """Sends messages by the operator's mail server."""

    def __init__(self, rules: SmtpRules, threads: Executor, timeout_seconds: float) -> None:
        self._rules, self._threads, self._timeout_seconds = rules, threads, timeout_seconds

    async def send(self, address: str, subject: str, text: str, message_id: str) -> None:
        """Send a message.

        Raises:
            Undelivered: the mail server did not accept it.
        """
        message = EmailMessage()
        message["From"], message["To"], message["Subject"] = self._rules.sender, address, subject
        message["Date"] = formatdate()
        message["Message-ID"] = f"<{message_id}@{self._rules.sender.rpartition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(text)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._send, message)
        except smtplib.SMTPRecipientsRefused as error:
            code = next(iter(error.recipients.values()))[0]
            raise Undelivered(f"the mail server answered {code}", passing=code < PERMANENT) from None
        except smtplib.SMTPResponseException as error:
            raise Undelivered(f"the mail server answered {error.smtp_code}") from None
        except (OSError, smtplib.SMTPException) as error:
            raise Undelivered(f"the mail server failed: {type(error).__name__}") from None

    def _send(self, message: EmailMessage) -> None:
        rules = self._rules
        with smtplib.SMTP(rules.host, rules.port, timeout=self._timeout_seconds) as server:
            if rules.starttls:
                context = ssl.create_default_context()
                if rules.ca_file:
                    context.load_verify_locations(rules.ca_file)
                server.starttls(context=context)
            if rules.user:
                server.login(rules.user, rules.password)
            server.send_message(message)
