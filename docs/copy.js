// A button on each block of code that copies it; of a session with prompts, the commands alone.
for (const code of document.querySelectorAll("pre > code")) {
  if (code.closest(".language-text")) continue; // messages
  const button = document.createElement("button");
  button.className = "copy";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const lines = code.textContent.split("\n");
    const commands = lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2));
    await navigator.clipboard.writeText(commands.length ? commands.join("\n") : code.textContent);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  code.parentElement.prepend(button);
}
