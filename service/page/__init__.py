"""A page to try the service in a browser.

It hands out static files of its own, which work with the same requests as every client.
It knows nothing of images, of the model or of what the service answers.
"""
