"""Fetches, checks, decodes and stores the pictures of requests, by digest.

All of this happens before sampling, outside the event loop, and errors name the picture's path.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from palestra.config import PicturesConfig
from palestra.errors import InvalidRequest, NotFound, PayloadTooLarge, UnsupportedField
from palestra.pictures.blobs import Charge, KeptPictures, is_digest
from palestra.pictures.containers import MAX_PICTURE_BYTES, InvalidPicture
from palestra.server.dialects.base import DialectRequest
from palestra.server.dialects.sent_pictures import SentPicture, with_digests
from palestra.server.picture_fetch import PictureFetcher
from palestra.session import PolicyRuntime
from palestra.threads import WorkPool

LOW_SIDE = 512  # pixels; the longest side of a picture with OpenAI's `detail = "low"`
_REMEMBERED = 4096  # URLs whose digests, and pictures whose small copies, are remembered

MAX_IN_CALL = 100  # pictures in the messages of one call, all of which are decoded before it is answered


class PictureIntake:
    """Replaces pictures of requests by digests of files in the run's folder.

    A URL is fetched once per process, so that it is the same picture in later turns.
    """

    def __init__(self, kept: KeptPictures, config: PicturesConfig, pool: WorkPool) -> None:
        """Create the intake. `config`: number of pictures per call, and allowed hosts."""
        self._kept, self._config, self._pool = kept, config, pool
        self._fetcher = PictureFetcher(config)
        self._fetched: OrderedDict[str, str] = OrderedDict()  # digest by URL
        self._small: OrderedDict[str, str] = OrderedDict()  # digest of the small copy by that of the picture

    async def settle(
        self,
        asked: DialectRequest[Any],
        pictures: Sequence[SentPicture],
        runtime: PolicyRuntime,
        charge: Charge | None = None,
    ) -> None:
        """Store every picture of a request on disk, and make it an image part with a digest.

        Args:
            pictures: of its first call's messages, in order; at least one.
            charge: counts the bytes of new pictures, if given.

        Raises:
            UnsupportedField: the policy's model accepts no images, or the file type is not accepted.
            InvalidRequest: a picture is damaged, too large or not allowed, there are too many, or a digest is unknown.
            PayloadTooLarge: the pictures of the run, or those of the episode, would exceed their limit.
            EpisodeLeaseExpired: the episode is over.
        """
        first = pictures[0].place
        if not runtime.renderer.takes_images:
            raise UnsupportedField(
                f"{first}: the model of the policy {runtime.name!r} takes no images; leave the picture out", first
            )
        if len(pictures) > MAX_IN_CALL:
            raise InvalidRequest(
                f"{pictures[MAX_IN_CALL].place}: the messages have {len(pictures)} pictures, "
                f"and those of a call may have {MAX_IN_CALL}",
                "messages",
            )
        digests = {picture.place: await self._settled(picture, charge) for picture in pictures}
        asked.calls = tuple(with_digests(call, lambda picture: digests[picture.place]) for call in asked.calls)

    async def keep(self, data: bytes, media_type: str | None = None, charge: Charge | None = None) -> str:
        """Check, decode and store an uploaded picture, and return its digest. `media_type`: given by the client, if
        any. Raises InvalidRequest: the file is not an accepted picture. Raises PayloadTooLarge, EpisodeLeaseExpired:
        see `settle`.
        """
        return await self._pool.run(self._kept.keep, data, media_type, charge)

    async def _settled(self, picture: SentPicture, charge: Charge | None) -> str:
        """Return the digest of a stored picture. Errors start with its path."""
        try:
            if picture.url is not None:
                digest = await self._of_url(picture.url, charge)
            else:
                digest = await self._pool.run(self._of_request, picture, charge)
            return await self._pool.run(self._small_copy, digest, charge) if picture.low else digest
        except (InvalidRequest, NotFound, PayloadTooLarge) as error:
            message = f"{picture.place}: {error}"
            if isinstance(error, PayloadTooLarge):
                raise PayloadTooLarge(message) from error
            raise InvalidRequest(message, picture.place) from error

    async def _of_url(self, url: str, charge: Charge | None) -> str:
        digest = self._fetched.get(url)
        if digest is None or not await self._pool.run(self._kept.renew, digest):
            digest = await self.keep(await self._fetcher.fetch(url), charge=charge)
        _remember(self._fetched, url, digest)
        return digest

    def _of_request(self, picture: SentPicture, charge: Charge | None) -> str:
        """Return the digest of a picture that the request itself has or names. Blocks for the disk and the decoder."""
        if picture.base64 is None:
            if picture.named is None or not is_digest(picture.named):
                raise InvalidPicture("a picture is named by the 64 hexadecimal digits of its SHA-256")
            if not self._kept.renew(picture.named):
                raise InvalidPicture(f"there is no picture {picture.named}; upload it first (PUT /pictures/DIGEST)")
            return picture.named
        if len(picture.base64) > MAX_PICTURE_BYTES // 3 * 4 + 4:
            raise InvalidPicture(f"its file has more than {MAX_PICTURE_BYTES:,} bytes")
        try:
            data = base64.b64decode(picture.base64, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidPicture("its base64 can't be decoded") from None
        return self._kept.keep(data, picture.media_type, charge)

    def _small_copy(self, digest: str, charge: Charge | None) -> str:
        """Return the digest of a copy with at most `LOW_SIDE` pixels on a side. Blocks for the disk and the decoder."""
        small = self._small.get(digest)
        if small is None or not self._kept.renew(small):
            small = self._kept.small_copy(digest, LOW_SIDE, charge)
        _remember(self._small, digest, small)
        return small


def _remember(known: OrderedDict[str, str], key: str, digest: str) -> None:
    known[key] = digest
    known.move_to_end(key)
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
