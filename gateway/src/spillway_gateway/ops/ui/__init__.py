"""The live page at /ui: one HTML file, its script and style, and the state that they show. No build step."""
